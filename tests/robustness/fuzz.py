"""Spoils valid inputs, by a seed, and says what the commands do with them.

A case is its number: number -> kind of input -> what is spoilt and how. Every case goes through a real entry point.
"""

import datetime
import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mpc_dist.training.checkpoint_folder import seal
from tests.robustness import entry
from tests.robustness.workshop import PLANNING, WORDS, Workshop, copy_run, read_json

HUGE = (
    2**31,
    2**63,
    2**64,
    10**9,
    10**12,
    10**30,
    10**400,
    -1,
    -(10**30),
    1e308,
    -1e308,
    math.nan,
    math.inf,
    -math.inf,
)
STRANGE: tuple[Any, ...] = (
    *HUGE,
    None,
    True,
    False,
    0,
    1,
    2,
    3.5,
    5e-324,
    "",
    " ",
    "x",
    "auto",
    "never",
    "null",
    "1",
    "1e400",
    "1" * 5000,
    "0x" + "f" * 5000,
    "a" * 5000,
    "\x00",
    "a\nb\r\nc",
    "\u202eßé漢字🦆",
    "\ud7ff\ufeff",
    "[bold]x[/bold]",
    "${HOME}",
    "../../../etc/passwd",
    "/dev/full",
    "/proc/self/mem",
    [],
    {},
    [1],
    [0],
    [1, 1],
    [-1, 3],
    [10**30],
    ["x", None, {}],
    {"a": 1},
    {1: 2, None: 3},
    [[[[[[[[]]]]]]]],
    list(range(5000)),
    datetime.date(2001, 1, 1),
    b"\xff\x00",
    {"name": "gpt"},
    {"__class__": "os.system"},
)


class Ran:
    """Says so if it is ever unpickled: touches a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.witness),))


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    number: int
    kind: str
    what: str
    """What was spoilt."""
    answer: entry.Answer
    failure: str | None
    """What must not happen, if it did."""


Spoil = Callable[[Workshop, random.Random, Path], tuple[str, entry.Answer, str | None]]
"""Spoils something in an empty folder and runs a command: what, its answer, and what else is wrong."""


def run_case(shop: Workshop, number: int, folder: Path) -> Outcome:
    """Spoil, run, judge; the folder is made and removed."""
    kind, spoil = KINDS[number % len(KINDS)]
    rng = random.Random(number)
    folder.mkdir()
    here = Path.cwd()
    os.chdir(folder)  # where relative paths that the fuzzer makes up lead
    try:
        what, answer, failure = spoil(shop, rng, folder)
        if (folder / "ran").exists():
            failure = "code of the input ran"
    finally:
        os.chdir(here)
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(number, kind, what, answer, answer.failure or failure)


def _config_field(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    """One field of a valid configuration with another value: the error must name the field."""
    config = _config_of(shop, rng.choice(FAMILIES))
    section = rng.choice([name for name, value in config.items() if isinstance(value, dict)] + [""])
    fields = config[section] if section else config
    name = rng.choice(list(fields))
    fields[name] = rng.choice(STRANGE)
    path = f"{section}.{name}" if section else name
    what = f"{path} = {_short(fields[name])}"
    answer = _train_config(folder, yaml.safe_dump(config, allow_unicode=True), rng)
    known = {name, section, path, "config.yaml"} - {""}
    said = answer.error
    is_named = (
        answer.code != 2
        or path in said
        or (not section and name in said)
        or any(word in said for word in NAMED_OTHERWISE.get(path, ()))
    )
    failure = None if is_named else f"the error does not name {path} ({known}): {said}"
    return what, answer, failure or _left_behind(answer, folder)


NAMED_OTHERWISE = {
    "model.name": ("unknown model",),
    "data.name": ("unknown data",),
    "model": ("unknown model",),
    "data": ("unknown data",),
}
"""Fields whose errors name them in other words."""


def _config_text(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    """A configuration whose text is no good YAML, or too much of it."""
    text = yaml.safe_dump(shop.config)
    what = rng.choice(list(TEXTS))
    content = TEXTS[what](text, rng)
    answer = _train_config(folder, content, rng)
    return what, answer, _left_behind(answer, folder)


def _bomb(depth: int, width: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, depth):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join([*lines, f"seed: *a{depth - 1}"])


def _flip(content: bytes, rng: random.Random, count: int) -> bytes:
    spoilt = bytearray(content)
    for _ in range(count):
        if spoilt:
            spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


TEXTS: dict[str, Callable[[str, random.Random], bytes | str]] = {
    "a YAML bomb": lambda _, rng: _bomb(rng.randrange(5, 30), 10),
    "a YAML bomb in a section": lambda _, rng: _bomb(9, 9).replace("seed:", "optimizer: {scheduler_arguments:") + "}",
    "a mapping bomb": lambda _, rng: "\n".join(
        ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}}}" for i in range(1, 40)), "model: *a39"]
    ),
    "merge keys": lambda _, rng: "\n".join(
        ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12))]
    ),
    "an alias of itself": lambda _, rng: rng.choice(
        ["&a [*a]", "model: &m {name: *m}", "a: &a {b: *a}", "seed: &s [*s]"]
    ),
    "an alias of nothing": lambda _, rng: "seed: *nowhere",
    "deep nesting": lambda _, rng: rng.choice(["[", "{a: ", "- ", "? "]) * rng.randrange(50, 20_000),
    "deep nesting, closed": lambda _, rng: "seed: " + "[" * 400 + "]" * 400,
    "a key given twice": lambda text, rng: text + text[: rng.randrange(40, len(text))],
    "random bytes": lambda _, rng: rng.randbytes(rng.randrange(1, 5000)),
    "flipped bits": lambda text, rng: _flip(text.encode(), rng, rng.randrange(1, 30)),
    "a cut": lambda text, rng: text[: rng.randrange(len(text))],
    "a text of another encoding": lambda text, rng: text.encode(rng.choice(["utf-16", "utf-32", "utf-7"])),
    "a tag that makes objects": lambda _, rng: f"seed: !!python/object/apply:os.mkdir [{'ran'}]",
    "an unknown tag": lambda _, rng: rng.choice(["seed: !x 1", "!!set {a, b}", "seed: !!binary abc=", "!!omap [a: 1]"]),
    "several documents": lambda text, rng: f"{text}\n---\n{text}",
    "no mapping": lambda _, rng: rng.choice(["3", "x", "[]", "- a", "~", "", "!!null", "2001-99-99", "true", "'"]),
    "strange keys": lambda _, rng: rng.choice(
        ["3: 1", "~: 1", "[a]: 1", "{a: b}: 1", "true: 1", "'': 1", "é漢: 1", "'a.b': 1"]
    ),
    "a strange key in a section": lambda _, rng: (
        f"{rng.choice(SECTIONS)}: {{{rng.choice(['3', '~', '[a]', 'x', '漢'])}: 1}}"
    ),
    "a long line": lambda _, rng: f"{rng.choice('ax1')}" * 300_000,
    "a large number": lambda _, rng: f"seed: {rng.choice(['0x', '0b', '', '-', '1:'])}" + "1" * 100_000,
    "many keys": lambda _, rng: "\n".join(f"k{i}: {i}" for i in range(3_000)),
    "control characters": lambda text, rng: text.replace("gpt", "g\x1b[31mpt\x07"),
    "a pickle": lambda _, rng: pickle.dumps(Ran(Path("ran"))),
}
SECTIONS = (
    "model",
    "data",
    "horizon",
    "parallel",
    "training",
    "optimizer",
    "checkpoints",
    "tracking",
    "readout",
    "lora",
)


def _config_shape(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    """Several things at once: sections dropped, replaced, moved, unknown keys added."""
    config = _config_of(shop, rng.choice(FAMILIES))
    done = []
    for _ in range(rng.randrange(1, 5)):
        section = rng.choice(list(config) or ["model"])
        how = rng.randrange(5)
        if how == 0:
            config.pop(section, None)
        elif how == 1:
            config[section] = rng.choice(STRANGE)
        elif how == 2:
            config[rng.choice(["x", "Model", "é", 3, None, "model.name", "a" * 3000])] = rng.choice(STRANGE)
        elif isinstance(config.get(section), dict):
            inner = rng.choice([*config[section], "x", "widht", 7])
            config[section][inner] = rng.choice(STRANGE)
            section = f"{section}.{inner}"
        done.append(f"{how}:{section}")
    answer = _train_config(folder, yaml.safe_dump(config, allow_unicode=True), rng)
    return " ".join(map(str, done))[:200], answer, _left_behind(answer, folder)


def _command_line(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    """Options with strange values."""
    options = []
    for _ in range(rng.randrange(1, 4)):
        section = rng.choice(list(shop.config))
        value = shop.config[section]
        name = f"{section}.{rng.choice(list(value))}" if isinstance(value, dict) else section
        name = rng.choice([name, name, name, section, "horizon", "plan", "nonsense", "model..width"])
        given = rng.choice(STRANGE)
        word = given if isinstance(given, str) else _as_word(given)
        options += rng.choice([[f"--{name}", word], [f"--{name}={word}"], [f"--{name}"], [word]])
    options = [word.replace("\x00", "␀") for word in options]  # no operating system passes a zero byte
    answer = entry.train(*shop.gpt, "--training.folder", str(folder / "out"), *options)
    return " ".join(options)[:200], answer, _left_behind(answer, folder)


def _plan(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    """A plan with something else in it."""
    path = folder / "plan.yaml"
    if rng.random() < 0.25:
        what = rng.choice(list(TEXTS))
        _write(path, TEXTS[what](shop.plan.read_text(), rng))
    else:
        content = yaml.safe_load(shop.plan.read_text())
        what = _spoil_tree(content, rng, rng.randrange(1, 3))
        path.write_text(yaml.safe_dump(content, allow_unicode=True))
    answer = entry.train(*shop.gpt, "--training.folder", str(folder / "out"), "--plan", str(path))
    return what, answer, _left_behind(answer, folder)


def _profile(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    """A profile, of angles or of blocks, with something else in it."""
    shutil.copytree(shop.profiles, folder / "profiles")
    path = rng.choice(sorted((folder / "profiles").iterdir()))
    what = f"{path.name.partition('-')[0]}: {_spoil_json(path, rng)}"
    options = [*shop.gpt, *PLANNING.split()]
    answer = entry.mpc_dist(
        "plan", *options, "--profiles", str(folder / "profiles"), "--out", str(folder / "out/p.yaml")
    )
    return what, answer, _left_behind(answer, folder)


def _checkpoint_state(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    """What a run's only checkpoint says of itself."""
    (checkpoint,) = copy_run(shop, folder / "run", keep=1)
    what = _spoil_json(checkpoint / "state.json", rng, seal=seal_state)
    return what, *_go_on(shop, rng, folder, checkpoint)


def seal_state(content: Any) -> Any:
    """With its checksum mended, as a forger would."""
    if not isinstance(content, dict):
        return content
    return seal({key: value for key, value in content.items() if key != "sha256"})


def _checkpoint_tensors(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    """A run's only checkpoint, with other tensors: with its checksum mended, or not."""
    (checkpoint,) = copy_run(shop, folder / "run", keep=1)
    (path,) = checkpoint.glob("*.safetensors")
    what = _spoil_bytes(path, rng)
    if rng.random() < 0.6:
        import hashlib

        content, state = path.read_bytes() if path.is_file() else b"", read_json(checkpoint / "state.json")
        state["files"][path.name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        (checkpoint / "state.json").write_text(json.dumps(seal_state(state)))
        what += ", checksum mended"
    return what, *_go_on(shop, rng, folder, checkpoint)


def _go_on(shop: Workshop, rng: random.Random, folder: Path, checkpoint: Path) -> tuple[entry.Answer, str | None]:
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    if rng.random() < 0.3:
        answer = entry.mpc_dist("export", str(folder / "run"), "--to", str(folder / "out"))
        return answer, _left_behind(answer, folder)
    answer = entry.train(*shop.gpt, "--training.folder", str(folder / "run"), "--training.steps", "5")
    after = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    changed = sorted(str(path.relative_to(folder)) for path in {*before, *after} if before.get(path) != after.get(path))
    failure = f"refused, but it changed {changed}" if answer.code == 2 and changed else None
    return answer, failure


def _metrics(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    """A run's metrics with something else in them, shown by `mpc-dist report`."""
    copy_run(shop, folder / "run")
    path = folder / "run" / "metrics-rank0.jsonl"
    if rng.random() < 0.3:
        what = _spoil_bytes(path, rng)
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        what = _spoil_tree(lines, rng, 1)
        path.write_text("".join(json.dumps(line, default=str) + "\n" for line in lines))
    answer = entry.mpc_dist("report", str(folder / "run"), "--out", str(folder / "out"))
    return what, answer, _left_behind(answer, folder)


def _cifar(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    shutil.copytree(shop.cifar, folder / "cifar")
    what = _spoil_bytes(folder / "cifar" / rng.choice(["data_batch_1", "test_batch"]), rng)
    options = [*WORDS["resnet"].split(), "--data.name", "cifar10", "--data.num_train_files", "1"]
    answer = entry.train(*options, "--data.folder", str(folder / "cifar"), "--training.folder", str(folder / "out"))
    return what, answer, _left_behind(answer, folder)


def _text(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    path = folder / "text.txt"
    shutil.copy(shop.text, path)
    what = _spoil_bytes(path, rng)
    options = [*WORDS["gpt"].split(), "--data.path", str(path), "--data.unit", rng.choice(["bytes", "characters"])]
    answer = entry.train(*options, "--training.folder", str(folder / "out"))
    return what, answer, _left_behind(answer, folder)


def _pictures(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    shutil.copytree(shop.pictures, folder / "pictures")
    for path in sorted((folder / "pictures").rglob("*.png")):
        what = _spoil_bytes(path, rng)
    options = [
        *WORDS["resnet"].split(),
        "--data.name",
        "image_folder",
        "--data.size",
        "8",
        "--data.test_fraction",
        "0.3",
    ]
    answer = entry.train(*options, "--data.folder", str(folder / "pictures"), "--training.folder", str(folder / "out"))
    return what, answer, _left_behind(answer, folder)


def _trained(shop: Workshop, rng: random.Random, folder: Path) -> tuple[str, entry.Answer, str | None]:
    path = folder / "resnet.th"
    shutil.copy(shop.trained, path)
    what = _spoil_bytes(path, rng)
    options = [*WORDS["resnet"].split(), "--data.name", "cifar10", "--data.num_train_files", "1"]
    options += ["--data.folder", str(shop.cifar), "--model.checkpoint", str(path)]
    answer = entry.train(*options, "--training.folder", str(folder / "out"))
    return what, answer, _left_behind(answer, folder)


KINDS: tuple[tuple[str, Spoil], ...] = (
    ("config field", _config_field),
    ("config text", _config_text),
    ("config field", _config_field),
    ("config shape", _config_shape),
    ("command line", _command_line),
    ("plan", _plan),
    ("plan", _plan),
    ("profile", _profile),
    ("checkpoint state", _checkpoint_state),
    ("checkpoint tensors", _checkpoint_tensors),
    ("metrics", _metrics),
    ("CIFAR file", _cifar),
    ("text file", _text),
    ("pictures", _pictures),
    (".th file", _trained),
)


FAMILIES = ("gpt", "mlp", "resnet", "pictures")


def _config_of(shop: Workshop, family: str) -> dict[str, Any]:
    config = shop.config
    if family == "mlp":
        config["model"] = {"name": "res_mlp", "num_blocks": 2, "width": 4}
        config["data"] = {"name": "linear", "num_train": 20, "num_test": 8, "dimension": 4, "seed": 0}
    elif family != "gpt":
        config["model"] = {"name": "resnet_cifar", "blocks_per_group": 1, "channels": 4, "checkpoint": None}
        config["parallel"]["partition"] = [3]
    if family == "resnet":
        config["data"] = {"name": "cifar10", "folder": str(shop.cifar), "num_train_files": 1, "augment": True}
    if family == "pictures":
        config["data"] = {"name": "image_folder", "folder": str(shop.pictures), "size": 8, "channels": 3, "seed": 3}
        config["data"] |= {"test_fraction": 0.3, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2], "augment": True}
    return config


def _train_config(folder: Path, content: bytes | str, rng: random.Random) -> entry.Answer:
    path = folder / "config.yaml"
    _write(path, content)
    return entry.train(
        "--config", str(path), *([] if rng.random() < 0.2 else ["--training.folder", str(folder / "out")])
    )


def _left_behind(answer: entry.Answer, folder: Path) -> str | None:
    """A refused input leaves no run folder."""
    left = [name for name in ("out", "runs") if (folder / name).exists()]
    return f"refused, but it left {left}: {answer.error}" if answer.code == 2 and left else None


def _write(path: Path, content: bytes | str) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8", errors="surrogatepass")


def _spoil_json(path: Path, rng: random.Random, seal: Callable[[Any], Any] = lambda content: content) -> str:
    if rng.random() < 0.3:
        return _spoil_bytes(path, rng)
    content = read_json(path)
    what = _spoil_tree(content, rng, rng.randrange(1, 3))
    content = json.loads(json.dumps(content, default=str, skipkeys=True))
    path.write_text(json.dumps(seal(content) if rng.random() < 0.7 else content))
    return what


def _spoil_tree(content: Any, rng: random.Random, count: int) -> str:
    """Replace, remove or add something somewhere in it."""
    done = []
    for _ in range(count):
        node, path = content, "."
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.8:
                node, path = node[key], f"{path}{key}."
                continue
            how = rng.randrange(6)
            if how == 0:
                node.pop(key)
            elif how == 1 and isinstance(node, dict):
                node[rng.choice(["x", "é", "a" * 300])] = rng.choice(STRANGE)
            elif how == 1:
                node += [rng.choice(STRANGE)] * rng.choice([1, 5])
            else:
                node[key] = rng.choice(STRANGE)
            done.append(f"{path}{key} {how} {_short(node[key]) if how > 1 else ''}")
            break
    return "; ".join(done)


def _spoil_bytes(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    what = rng.choice(
        [
            "cut",
            "flips",
            "a flip",
            "flips at the start",
            "garbage",
            "empty",
            "folder",
            "pickle",
            "longer",
            "zeros",
            "gone",
        ]
    )
    if what == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif what == "flips":
        path.write_bytes(_flip(content, rng, rng.randrange(2, 200)))
    elif what == "a flip":
        path.write_bytes(_flip(content, rng, 1))
    elif what == "flips at the start":
        path.write_bytes(_flip(content[:300], rng, rng.randrange(1, 9)) + content[300:])
    elif what == "garbage":
        path.write_bytes(rng.randbytes(rng.randrange(1, 5000)))
    elif what == "pickle":
        path.write_bytes(pickle.dumps(Ran(path.parent / "ran"), protocol=rng.choice([0, 2, 4])))
    elif what == "longer":
        path.write_bytes(content + content)
    elif what == "zeros":
        path.write_bytes(bytes(len(content)))
    elif what == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if what == "folder":
            path.mkdir()
    return what


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**60:
        return f"{'-' if value < 0 else ''}10**{int(abs(value).bit_length() * 0.30103)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_word(value: Any) -> str:
    try:
        return json.dumps(value, default=str)
    except TypeError:  # a key that JSON lacks
        return repr(value)
