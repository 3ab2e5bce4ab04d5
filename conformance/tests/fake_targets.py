"""Callables that behave in every way in which a port can; loaded by name in worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from iha_core import AttentionConfig, attention, attention_stages


def honest(inputs, config):
    return attention(**inputs, config=AttentionConfig.from_dict(config))


honest.capabilities = {"invalid"}


def modest(inputs, config):
    """Right, and without capabilities."""
    return honest(inputs, config)


def stages(inputs, config):
    return attention_stages(**inputs, config=AttentionConfig.from_dict(config))


def no_validation(inputs, config):
    return np.zeros(1)


no_validation.capabilities = {"invalid"}


def off_by_one(inputs, config):
    return honest(inputs, config) + 1


def wrong_shape(inputs, config):
    return honest(inputs, config)[..., None]


def all_nan(inputs, config):
    return honest(inputs, config) * np.nan


def raises(inputs, config):
    raise ZeroDivisionError("gr\u00f6\u00dfer\n\u2265 [red]0[/red]")


def out_of_memory(inputs, config):
    raise MemoryError


def refuses(inputs, config):
    raise NotImplementedError("no kernels today")


def refuses_half(inputs, config):
    if inputs["q"].dtype.name == "float16":
        raise NotImplementedError("no float16")
    return honest(inputs, config)


def crashes(inputs, config):
    os._exit(3)


def segfaults(inputs, config):
    os.kill(os.getpid(), signal.SIGSEGV)


def exits(inputs, config):
    sys.exit("enough")


def interrupts(inputs, config):
    raise KeyboardInterrupt


def hangs(inputs, config):
    if "FAKE_PID_FILE" in os.environ:
        Path(os.environ["FAKE_PID_FILE"]).write_text(str(os.getpid()))
    time.sleep(3600)


def leaves_pid(inputs, config):
    Path(os.environ["FAKE_PID_FILE"]).write_text(str(os.getpid()))
    return honest(inputs, config)


def hangs_with_child(inputs, config):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(os.environ["FAKE_PID_FILE"]).write_text(str(child.pid))
    child.wait()


def crashes_on_masks(inputs, config):
    """Crashes on some cases, right on all others."""
    if "key_mask" in inputs:
        os._exit(3)
    return honest(inputs, config)


def hangs_on_masks(inputs, config):
    """Hangs on some cases, right on all others."""
    if "key_mask" in inputs:
        time.sleep(3600)
    return honest(inputs, config)


def prints(inputs, config):
    print("noise", flush=True)
    os.write(1, b"\x80\x05 more noise\n")
    print("input:", repr(sys.stdin.read()))
    return honest(inputs, config)


def overwrites(inputs, config):
    output = honest(inputs, config)
    for value in inputs.values():
        if isinstance(value, np.ndarray):
            value[...] = 1
    config.clear()
    inputs.clear()
    return output


_buffer: dict[tuple[int, ...], np.ndarray] = {}


def reuses_buffer(inputs, config):
    """Returns the same memory each time, and what was there before is gone."""
    output = honest(inputs, config)
    buffer = _buffer.setdefault(output.shape, np.empty_like(output))
    buffer[...] = output
    return buffer


def flickers(inputs, config):
    """Right within rounding, but never twice the same."""
    _flicker[0] += 1
    output = honest(inputs, config)
    return output * (1 + _flicker[0] * 2.0**-50)


_flicker = [0]


def wears_out(inputs, config):
    """Right the first time only, and the second result takes the place of the first in memory."""
    _flicker[0] += 1
    buffer = reuses_buffer(inputs, config)
    buffer += _flicker[0] % 2 == 0
    return buffer


def no_output(inputs, config):
    return {"virtual_out": np.zeros(1)}


def returns_list(inputs, config):
    return honest(inputs, config).tolist()


def returns_objects(inputs, config):
    return np.array([object()])


def sees_context(inputs, config):
    """Fails unless its inputs are what the contract says."""
    assert type(inputs) is dict
    assert type(config) is dict
    assert set(config) == set(AttentionConfig().to_dict())
    assert inputs["q"].flags.writeable
    assert os.getcwd() in sys.path
    return honest(inputs, config)


def gives_strides(inputs, config):
    """How q lies in memory, and whether it is in bfloat16."""
    return {"output": np.array(inputs["q"].strides), "lse": np.array(inputs["q"].dtype.name == "bfloat16")}


class Nested:
    method = staticmethod(honest)


def bad_capabilities(inputs, config):
    return honest(inputs, config)


bad_capabilities.capabilities = "invalid"


def misspelt_capability(inputs, config):
    return honest(inputs, config)


misspelt_capability.capabilities = {"invalid", "gradients"}


def capability_of_no_kind(inputs, config):
    return honest(inputs, config)


capability_of_no_kind.capabilities = True


def all_capabilities(inputs, config):
    return honest(inputs, config)


all_capabilities.vjp = honest
all_capabilities.capabilities = ["invalid", "gradient", "decode", "sharded"]


def returns_int(inputs, config):
    """Takes bad input, too, and then gives no array for the argument at fault."""
    return {"output": np.zeros(1), "alpha_k": 3}


returns_int.capabilities = {"invalid"}


def returns_nothing(inputs, config):
    pass


not_callable = 3


def gives_complex(inputs, config):
    return honest(inputs, config).astype(complex)
