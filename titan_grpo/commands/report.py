"""``titan-grpo report RUN``: write one self-contained HTML page about a run."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from titan_grpo.commands.processes import require_file
from titan_grpo.errors import ConfigError
from titan_grpo.observe.output import write_whole


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="titan-grpo report",
        description="Write one HTML page about a run, finished or not: what to know in words,"
        " curves, a timeline of every server. It needs no network and no other file.",
    )
    out.add_argument("run", type=Path, metavar="RUN", help="folder of the run (job.dump_folder)")
    where = "of the model whose tokenizer the run used (default: where the run found it)"
    out.add_argument("--tokenizer", type=Path, metavar="DIR", help=where)
    out.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in that folder")
    return out


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Write the page; returns 0. Raises ConfigError for a folder without a run or a tokenizer."""
    args = _parser().parse_args(argv)
    # Imported here, so that --help does not load numpy.
    from titan_grpo.views import page
    from titan_grpo.views.run import read_run

    out: Path = args.out or args.run / "report.html"
    found = read_run(args.run)
    require_file("--out", out)
    if args.tokenizer and not (args.tokenizer / "tokenizer.json").is_file():
        raise ConfigError(
            f"--tokenizer must be a folder with a tokenizer.json, got {str(args.tokenizer)!r}:"
            " completions would be numbers"
        )
    places = [args.tokenizer] if args.tokenizer else page.tokenizers_of(found, args.run)
    text = page.render(found, page.decoder(places))
    write_whole(out, text)
    print(f"{out}: {len(text.encode()) / 1e6:.1f} MB; open it in a browser")
    return 0
