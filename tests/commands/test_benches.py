"""Options of benches that take minutes: wrong ones end them at once."""

import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from scripts import (
    bench_delta,
    bench_gpu,
    bench_lanes,
    bench_pause,
    bench_plan,
    bench_sync,
    hosts_options,
)
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.infer import infer_layout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kill-inner --receivers 8", "--kill-inner needs --relay"),
        ("--kill-inner --relay --receivers 2", "--kill-inner needs --relay and 3 receivers"),
        ("--stop-s 5 --trainer-hosts 1", "--stop-s"),
        ("--step-s -1", "--step-s"),
        ("--changed 0", "--changed"),
        ("--receivers 300", "253 hosts at most"),
        ("--receivers 0", "--receivers: must be 1 or more, got '0'"),
        ("--versions 0", "--versions"),
        ("--rate 20", "--rate: must be like 20mbit"),
        ("--rate 0mbit", "--rate: must be like 20mbit, and over 0"),
        ("--rate 1.2.3mbit", "--rate: must be like 20mbit"),
        ("--json /proc/none/figures.json", "--json: must be a file in a folder to write to"),
    ],
)
def test_options_of_bench_hosts_that_do_not_go_together_are_named(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        hosts_options.parse("", words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--steps 0", "--lr -1", "--lr nan", "--shape none"])
def test_options_of_bench_delta_that_make_no_sense_are_named(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_delta.main(words.split())
    assert ended.value.code == 2
    assert words.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parse", "words"),
    [
        (bench_sync.parse, "--rounds 0"),
        (bench_sync.parse, "--mib -1"),
        (bench_lanes.parse, "--versions 0"),
        (bench_lanes.parse, "--window 0"),
        (bench_lanes.parse, "--mib 0"),
        (bench_pause.parse, "--rounds 0 --engine vllm"),
        (bench_gpu.main, "--versions 0"),
    ],
)
def test_a_bench_that_would_measure_nothing_says_which_option_is_wrong(
    parse: Callable[[list[str]], object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words.split())
    assert ended.value.code == 2
    assert f"{words.split()[0]}: must be 1 or more" in capsys.readouterr().err


def test_the_plan_beside_a_run_with_patches_has_patches_of_the_runs_size() -> None:
    """A version over a link that it fills for 4.5 s, of a step of 4 s."""
    fetch_s = {}
    for delta in ("off", "on"):
        options = bench_plan.parse(["--servers", "4", "--rate-mbit", "60", "--delta", delta])
        found = bench_plan.planned(options, patch_share=0.03)["fetch_s"]
        fetch_s[delta] = sorted(found)[len(found) // 2]
    assert 0.02 < fetch_s["on"] / fetch_s["off"] < 0.06


def test_what_bench_gpu_takes_for_a_repeated_load_is_one() -> None:
    """On a CPU, which has the same loads."""
    manifest = infer_layout(dict, bench_gpu.SHAPES["tiny"]).manifest("bfloat16", 4 << 20)
    for repeats in (True, False):
        with ExitStack() as stack:
            image = stack.enter_context(SharedImage.create(manifest.total_bytes, "bench"))
            image.buffer[:] = bytes(2) * (manifest.total_bytes // 2)
            server = bench_gpu.Server(manifest, image, stack, repeats, "cpu")
            for _ in range(2):
                server.deliver()
                server.deliver()
                assert server.repeats() == repeats
                assert server.connect(manifest) > 0.0


def test_bench_gpu_sees_that_a_thread_waits_for_a_page() -> None:
    with bench_gpu.longest_mmap() as longest:
        threading.Event().wait(0.2)
    assert 0.0 < longest[0] < 0.2
