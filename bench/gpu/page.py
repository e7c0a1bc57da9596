"""docs/gpu.md, from the results of `python -m bench gpu`. Pure, except for the names of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.figures import Figure
from bench.gpu.results import COMPLETE, LATE, PartResult, Setting, loaded
from tests.support.repository import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results" / "gpu"
PAGE = REPOSITORY / "docs" / "gpu.md"
PARTS: Mapping[str, str] = {
    "a": "transfers of KV between two engines",
    "b": "the lab's model of the engine",
    "c": "routers in front of several engines",
    "d": "what the connector costs an engine, and sleep",
}
CUDA, CPU = "cuda", "cpu"
NO_CARD = "**No card has run this yet: every figure below is from a CPU, and says nothing about a GPU.**"
HEAD = """\
# One GPU

{first}

Made by `python -m bench gpu`, which shows on a machine with one CUDA device and without a network what Pointsman does there.
Weights are made up, in the shapes of Qwen3 from 0.6B to 8B: nothing is downloaded, and answers mean nothing. Each part is a
process of its own of at most 8 minutes; its figures are in docs/results/gpu. A part that failed is told with its last lines.

- **a**: KV of prompts from one engine to another, layer by layer beside vLLM's own connector (after the prefill), chunked
  prefills on. *Overhead* is what a transfer leaves on the critical path: the time from the sender's answer to the receiver's
  first token; negative where the token came first.
- **b**: what prefills and decode steps take, what a long prefill does to streams, and the lab's model of this engine beside a
  replay.
- **c**: Pointsman's policies and other routers' programs in front of four to eight small engines, in paired rounds.
- **d**: what plug-in, events and checksums cost an engine's step; step loads; sleep.

All engines share one device, without MPS: while two compute, each has a part of its time. Transfers are Mooncake's over TCP,
unless the run says otherwise. A ratio is the value over the baseline of the same run, which the note names. In brackets: of
overheads the ratio to the transfer after the prefill, of prefills to one without a transfer, of routers to `auto` in the same
rounds (with the 95 % interval of several).
"""
RUN_IT = """\
## On your card

On any machine with an index of Python packages, in a checkout (PYTHON is that of the machine with the card):

```sh gpu
make gpu-wheels PYTHON=3.12 CUDA=13 PLAN=1   # which wheels, and how large
make gpu-wheels PYTHON=3.12 CUDA=13          # .state/gpu-wheels/parts: files of at most 60 MB, with digests
```

Copy that folder and the checkout to the machine, in whatever pieces, and run there, in the checkout:

```sh gpu
python parts/install.py --venv .venv-engine              # joins, checks, installs; names the parts that are missing
PATH=$PWD/.venv-engine/bin:$PATH python -m bench gpu     # all parts, 30 minutes; what is interrupted goes on
```

Part c has more trials than fit into 8 minutes: run the command again until it says that all parts are complete.

- The machine needs that Python with `venv` (pip comes along), 20 GB of disk, a C compiler, `nvidia-smi`, `setpriv`, and the
  libraries that Mooncake does not bring (Debian, Ubuntu: libibverbs1 libnuma1 libcurl4).
- Where vLLM's wheels are too much: `install.py --only pointsman` needs the first parts alone and takes the torch of the Python
  that it runs with. Parts a and d then measure the connector's workers on tensors, b and c say that they need vLLM.
- `--parts a,d` runs some, `--again` runs them again. `--eager` starts engines without compiled models and CUDA graphs, for a
  machine without a C compiler. `--protocol` is Mooncake's. `--commit` names the tree where there is no git.
- Other routers in part c are installed from the same wheels: set `UV_NO_INDEX=1` and `UV_FIND_LINKS` to `parts/wheels`. nginx is
  the system's.
- A card of 24 GB or more is enough. The memory decides the model's shape, how many engines there are and how long the prompts.
- The results are in docs/results/gpu, in files that end with `.cuda.json`: please send them with the page.
"""


def page(results: Mapping[str, Sequence[PartResult]]) -> str:
    """Return docs/gpu.md. `results`: those of each kind of device, in the order of the parts."""
    cuda, cpu = results.get(CUDA, ()), results.get(CPU, ())
    first = f"Run on {_named(cuda)}." if cuda else NO_CARD
    text = HEAD.format(first=first) + "\n" + RUN_IT
    if cuda:
        text += "\n## On the card\n\n" + _device(cuda)
    text += "\n## On a CPU\n\n"
    if not cpu:
        return text + "Not run.\n"
    text += (
        "The same command with `--device cpu`, so that it does not rot: vLLM's CPU build, a model of 4 layers, prompts of 512 to "
        "2,048 tokens, engines, routers and clients on cores that other programs use, too. These figures show that it runs, and "
        "no more.\n\n"
    )
    return text + _device(cpu)


def _named(results: Sequence[PartResult]) -> str:
    cards = dict.fromkeys(result.setting.card for result in results)
    return " and ".join(f"one {name}" for name in cards)


def _device(results: Sequence[PartResult]) -> str:
    text = ""
    for result in results:
        text += f"### {result.part}: {PARTS[result.part]}\n\n{_about(result)}\n\n"
        if result.problem:
            text += f"```text\n{result.problem}\n```\n\n"
        plain = [figure for figure in result.figures if len(_place(figure)) != 3]
        crossed = [figure for figure in result.figures if len(_place(figure)) == 3]
        for group in dict.fromkeys(_place(figure)[0] for figure in crossed):
            text += _crossed(group, [figure for figure in crossed if _place(figure)[0] == group]) + "\n"
        if plain:
            text += _table(plain) + "\n"
    return text.rstrip() + "\n"


def _about(result: PartResult) -> str:
    ended = {COMPLETE: "complete", LATE: "ended at its time limit"}.get(result.status, result.status)
    return f"{result.date}, {result.seconds:.0f} s, **{ended}**. {_setting(result.setting)}."


def _setting(setting: Setting) -> str:
    parts = [setting.card]
    if setting.driver:
        parts += [f"{setting.memory_gb:.0f} GB", f"driver {setting.driver}"]
    parts += [f"{name} {version}" for name, version in setting.versions.items()]
    parts += [setting.options] if setting.options else []
    return ", ".join([*parts, f"commit {setting.commit}"])


def _place(figure: Figure) -> list[str]:
    """Return where a figure is: of "GROUP / ROW / COLUMN" these three, so that it stands in the table of its group."""
    return figure.metric.split(" / ")


def _crossed(group: str, figures: Sequence[Figure]) -> str:
    """Return the table of a group. A cell has the value, and in brackets its ratio to the baseline and its note."""
    cells = {tuple(_place(figure)[1:]): figure for figure in figures}
    columns = list(dict.fromkeys(column for _, column in cells))
    rows = [f"| {' | '.join([group, *columns])} |", "|---" * (len(columns) + 1) + "|"]
    rows += [
        f"| {' | '.join([row, *(_cell(cells.get((row, column))) for column in columns)])} |"
        for row in dict.fromkeys(row for row, _ in cells)
    ]
    return "\n".join(rows) + "\n"


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    more = [_ratio(figure), figure.note]
    return f"{_amount(figure.value)} {figure.unit}".rstrip() + (
        f" ({'; '.join(filter(None, more))})" if any(more) else ""
    )


def _ratio(figure: Figure) -> str:
    # A negative time, of a token that came before an answer, has no ratio.
    return "" if figure.ratio is None or figure.ratio < 0 else f"{figure.ratio:.2f}"


def _table(figures: Sequence[Figure]) -> str:
    rows = ["| measure | value | baseline | ratio | note |", "|---|---|---|---|---|"]
    for figure in figures:
        baseline = "" if figure.baseline is None else _amount(figure.baseline)
        value = f"{_amount(figure.value)} {figure.unit}".rstrip()
        rows.append(f"| {figure.metric} | {value} | {baseline} | {_ratio(figure)} | {figure.note.replace('|', '/')} |")
    return "\n".join(rows) + "\n"


def _amount(value: float) -> str:
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def written() -> str:
    """Return the page of the results in docs/results/gpu."""
    return page({device: loaded(RESULTS, device, PARTS) for device in (CUDA, CPU)})
