"""One module per command of ``titan-grpo``; each has ``run(argv, env) -> exit code``."""
