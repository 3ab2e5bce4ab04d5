"""A port as a command, `exec_port.py MODE IN_DIR OUT_DIR`, that behaves in every way in which one can.

It reads and writes files by the library alone, as a port of somebody else would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import deserialize
from safetensors.numpy import save, save_file

from iha_core import AttentionConfig, attention_stages

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "BOOL": np.bool_,
}


def compute(path: Path) -> dict[str, np.ndarray]:
    """The wanted stages of one input file."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    about = json.loads(header["__metadata__"]["iha"])
    inputs = {
        name: np.frombuffer(entry["data"], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in deserialize(data)
    }
    offset = about["query_offset"]
    if offset is not None:
        inputs["query_offset"] = np.array(offset) if isinstance(offset, list) else offset
    stages = attention_stages(**inputs, config=AttentionConfig.from_dict(about["config"]))
    return {name: np.ascontiguousarray(stages[name]) for name in about["wanted"]}


def write(path: Path, out: Path) -> None:
    save_file(compute(path), out / path.name)


def raw(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# What is done for the first input file; the others are computed


def first_missing(path: Path, out: Path) -> None:
    pass


def first_nan(path: Path, out: Path) -> None:
    save_file({"output": compute(path)["output"] * np.nan}, out / path.name)


def first_truncated(path: Path, out: Path) -> None:
    (out / path.name).write_bytes(save(compute(path))[:-1])


def first_empty(path: Path, out: Path) -> None:
    (out / path.name).touch()


def first_symlink(path: Path, out: Path) -> None:
    (out / path.name).symlink_to("/etc/passwd")


def first_good_symlink(path: Path, out: Path) -> None:
    save_file(compute(path), out / "elsewhere")
    (out / path.name).symlink_to(out / "elsewhere")


def first_fifo(path: Path, out: Path) -> None:
    os.mkfifo(out / path.name)


def first_folder(path: Path, out: Path) -> None:
    (out / path.name).mkdir(mode=0)


def first_huge_shape(path: Path, out: Path) -> None:
    entry = {"dtype": "F64", "shape": [2**40, 2**40], "data_offsets": [0, 8]}
    (out / path.name).write_bytes(raw({"output": entry}, bytes(8)))


def first_sparse(path: Path, out: Path) -> None:
    with (out / path.name).open("wb") as file:
        file.truncate(2**40)


def first_misspelt(path: Path, out: Path) -> None:
    save_file(compute(path), out / path.name.replace("paper", "papre"))


def first_unknown_stage(path: Path, out: Path) -> None:
    stages = compute(path)
    save_file({"output": stages["output"], "virtual_outs": stages["virtual_out"]}, out / path.name)


def first_no_output(path: Path, out: Path) -> None:
    save_file({"lse": compute(path)["lse"]}, out / path.name)


def first_integers(path: Path, out: Path) -> None:
    save_file({"output": compute(path)["output"].astype(np.int64)}, out / path.name)


def first_skipped(path: Path, out: Path) -> None:
    (out / path.name).with_suffix(".skip").write_text("no kernels today\n\u2265 [red]two[/red]", "utf-8")


def first_skipped_without_reason(path: Path, out: Path) -> None:
    (out / path.name).with_suffix(".skip").touch()


def first_skipped_at_length(path: Path, out: Path) -> None:
    (out / path.name).with_suffix(".skip").write_text("no " * 10**6)


def first_both(path: Path, out: Path) -> None:
    first_skipped(path, out)
    write(path, out)


# What is done in between and at the end


def crash(out: Path) -> None:
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(out: Path) -> None:
    note()
    time.sleep(3600)


def fail(out: Path) -> None:
    print("printed", flush=True)
    sys.exit("could not clean up")


def complain(out: Path) -> None:
    for path in sorted(Path(sys.argv[-2]).iterdir()):
        print(f"cannot read {path.name}: expected more", file=sys.stderr)
    sys.exit(1)


def extra(out: Path) -> None:
    (out / "notes.txt").touch()
    (out / "core.other.float32.skip").touch()


def lose_all(out: Path) -> None:
    for path in out.iterdir():
        path.unlink()
    out.rmdir()


def leave_child(out: Path) -> None:
    """A child that keeps all streams open."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    note(child.pid)


def print_much(out: Path) -> None:
    for stream in (sys.stdout, sys.stderr):
        for _ in range(200):
            stream.write("x" * 10000 + "\n")
    assert sys.stdin.read() == ""


def note(pid: int | None = None) -> None:
    if "FAKE_PID_FILE" in os.environ:
        Path(os.environ["FAKE_PID_FILE"]).write_text(str(pid or os.getpid()))


def main() -> None:
    *modes, source, out = sys.argv[1:]
    paths = sorted(Path(source).iterdir())
    assert list(Path(out).iterdir()) == []
    start = {mode: globals()[mode] for mode in modes if mode.startswith("first_")}
    for function in start.values():
        function(paths.pop(0), Path(out))
    if "skip_all" in modes:
        for path in paths:
            first_skipped(path, Path(out))
    elif "nothing" not in modes:
        for path in paths:
            write(path, Path(out))
    for mode in modes:
        if mode not in start and mode in globals():
            globals()[mode](Path(out))


if __name__ == "__main__":
    main()
