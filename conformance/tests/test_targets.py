"""Targets in processes of their own: whatever they do, each job has one result and the next one works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from processes import wait_for_text, wait_until_gone

from iha_conformance.protocol import Job, TargetUnavailable
from iha_conformance.targets.backends import (
    NAMESPACES,
    canonical_name,
    is_known,
    known_targets,
    missing_module,
)
from iha_conformance.targets.bridges import NamespaceBridge, TorchBridge
from iha_conformance.targets.messages import Launch, RefusedError, describe, one_line
from iha_conformance.targets.process import ProcessTarget
from iha_core import STAGES, AttentionConfig, attention

HERE = str(Path(__file__).parent)
SHAPES = {
    "q": (1, 3, 2, 4),
    "k": (1, 3, 2, 4),
    "v": (1, 3, 2, 4),
    "alpha_q": (2, 2, 2),
    "alpha_k": (2, 2, 2),
    "alpha_v": (2, 2, 2),
    "collapse": (2, 2, 2),
}


def make_job(dtype: str = "float32", **fields) -> Job:
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    inputs |= fields.pop("extra", {})
    config = AttentionConfig().to_dict()
    return Job(
        **{"case_id": "case", "dtype": dtype, "inputs": inputs, "config": config, "wanted": STAGES} | fields
    )


@pytest.fixture
def launch():
    """Launches callables of fake_targets.py, and ends them."""
    started = []

    def start(name: str, *, kind="callable", timeout=20.0, device=None) -> ProcessTarget:
        full = f"fake_targets:{name}" if kind == "callable" and ":" not in name else name
        target = ProcessTarget(Launch(kind=kind, name=full, directory=HERE, device=device), timeout=timeout)
        started.append(target)
        return target

    yield start
    for target in started:
        target.close()


def results(target: ProcessTarget, *jobs: Job) -> list:
    return list(target.evaluate(jobs))


# What a well-behaved callable sees and gives


def test_callable_gives_its_output(launch):
    target = launch("honest")
    job = make_job()
    (result,) = results(target, job)
    assert (result.kind, result.reason, result.repeatable, result.rerun) == ("arrays", None, True, None)
    np.testing.assert_array_equal(
        result.arrays["output"], attention(**job.inputs, config=AttentionConfig.from_dict(job.config))
    )
    assert target.capabilities == {"invalid"}
    assert (target.info.name, target.info.device) == ("fake_targets:honest", "cpu")
    assert target.info.precision == "undeclared"
    assert result.seconds > 0


def test_every_known_capability_may_be_declared(launch):
    assert launch("all_capabilities").capabilities == {"invalid", "gradient", "decode", "sharded"}


def test_callable_sees_plain_dicts_with_writable_arrays(launch, monkeypatch):
    monkeypatch.chdir(HERE)
    (result,) = results(launch("sees_context"), make_job())
    assert result.kind == "arrays", result.reason


def test_callable_may_be_an_attribute_of_an_attribute(launch):
    (result,) = results(launch("Nested.method"), make_job())
    assert result.kind == "arrays"


def test_stages_travel_as_far_as_they_are_wanted(launch):
    target = launch("stages")
    everything, some = results(target, make_job(), make_job(wanted=("output", "lse")))
    assert set(everything.arrays) == set(STAGES)
    assert set(some.arrays) == {"output", "lse"}


def test_bfloat16_and_layouts_reach_a_callable(launch):
    job = make_job()
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in job.inputs.items()}
    wide, laid_out = results(
        launch("gives_strides"), job, make_job(dtype="bfloat16", inputs=narrow, layout="transposed")
    )
    assert wide.arrays["output"].tolist() == [96, 32, 16, 4]
    assert not wide.arrays["lse"]
    assert laid_out.arrays["output"].tolist() == [2, 2, 6, 12]
    assert laid_out.arrays["lse"]


# Misbehaviour


@pytest.mark.parametrize(
    ("name", "failure", "reason"),
    [
        ("raises", "raised", "ZeroDivisionError: gr\u00f6\u00dfer \u2265 [red]0[/red]"),
        ("out_of_memory", "raised", "MemoryError"),
        ("crashes", "crashed", "the process ended with exit status 3"),
        ("segfaults", "crashed", "the process was ended by SIGSEGV"),
        ("exits", "crashed", "SystemExit: enough"),
        ("interrupts", "crashed", "KeyboardInterrupt"),
        ("no_output", "missing", "expected 'output' among the returned stages, got 'virtual_out'"),
        ("returns_nothing", "missing", "expected the output or a dict of stages, got None"),
        ("returns_list", "raised", "TypeError: `output`: expected a numpy array, got list"),
        ("returns_int", "raised", "TypeError: `alpha_k`: expected a numpy array, got int"),
        ("returns_objects", "raised", "TypeError: `output`: expected an array of numbers, got dtype object"),
    ],
)
def test_failures_have_a_kind_and_a_reason(launch, name, failure, reason):
    first, second = results(launch(name), make_job(), make_job(case_id="next"))
    assert (first.kind, first.failure, first.reason) == ("failed", failure, reason)
    assert (second.case_id, second.failure, second.reason) == ("next", failure, reason)


def test_error_types_are_named(launch):
    (result,) = results(launch("raises"), make_job())
    assert result.error_types == (
        "ZeroDivisionError",
        "ArithmeticError",
        "Exception",
        "BaseException",
    )


def test_a_hanging_target_is_ended_in_time(launch):
    start = time.monotonic()
    first, second = results(launch("hangs", timeout=0.4), make_job(), make_job())
    assert (first.failure, first.reason) == ("hung", "no result within 0.4 s")
    assert second.failure == "hung"
    assert time.monotonic() - start < 10


def test_what_is_no_array_does_not_pass_for_a_refusal(launch):
    """Such a TypeError is the kit's; a case of bad input asks for one of the target's."""
    (result,) = results(launch("returns_int"), make_job(capability="invalid"))
    assert (result.failure, result.error_types) == ("raised", ())


def test_a_target_that_hangs_three_times_in_a_row_is_not_run_again(launch):
    mask = {"key_mask": np.ones((1, 3), dtype=bool)}
    bad, good, undeclared = make_job(extra=mask), make_job(), make_job(capability="invalid")
    jobs = [bad, good, bad, undeclared, bad, bad, good, undeclared, bad]
    found = results(launch("hangs_on_masks", timeout=2), *jobs)
    hung, not_run = "no result within 2 s", "not run: hung 3 times in a row"
    undeclared_reason = "the target does not declare the capability 'invalid'"
    assert [result.reason for result in found] == [
        *[hung, None, hung, undeclared_reason, hung, hung],
        *[not_run, undeclared_reason, not_run],
    ]
    assert [(found[i].kind, found[i].failure, found[i].seconds) for i in (5, 6, 8)] == [
        ("failed", "hung", 2.0),
        ("failed", "hung", 0.0),
        ("failed", "hung", 0.0),
    ]


@pytest.mark.parametrize("name", ["crashes_on_masks", "hangs_on_masks"])
def test_the_next_case_works(launch, name):
    mask = {"key_mask": np.ones((1, 3), dtype=bool)}
    jobs = [make_job(), make_job(extra=mask), make_job()]
    kinds = [result.kind for result in results(launch(name, timeout=2), *jobs)]
    assert kinds == ["arrays", "failed", "arrays"]


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="processes of this system have no groups")
def test_what_a_hanging_target_started_ends_with_it(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PID_FILE", str(tmp_path / "pid"))
    (result,) = results(launch("hangs_with_child", timeout=2), make_job())
    assert result.failure == "hung"
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_refusal_keeps_its_reason(launch):
    (result,) = results(launch("refuses"), make_job())
    assert (result.kind, result.reason) == ("refused", "no kernels today")


def test_prints_go_to_standard_error(launch, capfd):
    (result,) = results(launch("prints"), make_job())
    assert result.kind == "arrays", result.reason
    out, err = capfd.readouterr()
    assert out == ""
    assert "noise" in err
    assert "input: ''" in err


@pytest.mark.parametrize("name", ["overwrites", "reuses_buffer"])
def test_in_place_changes_harm_nobody(launch, name):
    job, other = make_job(), make_job(case_id="next")
    expected = results(launch("honest"), job)[0].arrays["output"]
    for result in results(launch(name), job, other):
        assert result.repeatable is True, result.reason
        np.testing.assert_array_equal(result.arrays["output"], expected)


def test_different_bits_are_noticed(launch):
    (result,) = results(launch("flickers"), make_job())
    assert result.repeatable is False
    assert result.rerun is not None
    assert result.rerun["output"].tobytes() != result.arrays["output"].tobytes()


def test_reused_buffer_is_no_excuse(launch):
    (result,) = results(launch("wears_out"), make_job())
    assert result.repeatable is False


def test_equal_nans_are_equal_bits(launch):
    (result,) = results(launch("all_nan"), make_job())
    assert result.repeatable is True


def test_undeclared_capability_is_not_applicable(launch):
    target = launch("crashes")
    (result,) = results(target, make_job(capability="invalid"))
    assert result.kind == "not_applicable"
    assert "'invalid'" in result.reason


def test_bad_input_reaches_a_target_that_declares_it(launch):
    bad = make_job(capability="invalid", extra={"alpha_k": np.zeros((2, 2), np.float32)})
    (result,) = results(launch("honest"), bad)
    assert (result.failure, result.error_types[:2]) == ("raised", ("ShapeError", "IHAError"))
    assert "`alpha_k`" in result.reason


def test_closed_target_gives_nothing_more(launch):
    target = launch("honest")
    iterator = target.evaluate([make_job(), make_job()])
    next(iterator)
    target.close()
    assert list(iterator) == []


def test_unreadable_answer_is_a_crash(launch, monkeypatch):
    # A target that finds the pipe and writes to it: no pickle comes back.
    target = launch("honest")
    assert target.info
    worker = target._worker
    monkeypatch.setattr("iha_conformance.targets.process.pickle.load", lambda stream: stream.read(0) or 1 / 0)
    first = results(target, make_job())[0]
    monkeypatch.undo()
    assert first.failure == "crashed"
    assert results(target, make_job())[0].kind == "arrays"
    assert target._worker is not worker


# Targets that cannot be launched


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:fn", "no module named 'no_such_module'"),
        ("fake_targets:absent", "'fake_targets' has no attribute 'absent'"),
        ("fake_targets:Nested.absent", "'fake_targets.Nested' has no attribute 'absent'"),
        ("fake_targets:not_callable", "expected a callable, got int"),
        ("fake_targets:bad_capabilities", "expected capabilities to be a set of names, got 'invalid'"),
        ("fake_targets:capability_of_no_kind", "expected capabilities to be a set of names, got True"),
        (
            "fake_targets:misspelt_capability",
            "expected capabilities among invalid, gradient, decode, sharded, got 'gradients'",
        ),
        ("fake_targets", "expected MODULE:CALLABLE, got 'fake_targets'"),
        ("fake_targets:", "expected MODULE:CALLABLE, got 'fake_targets:'"),
    ],
)
def test_unavailable_callables_say_why(name, reason):
    target = ProcessTarget(Launch(kind="callable", name=name, directory=HERE), timeout=20)
    try:
        with pytest.raises(TargetUnavailable) as caught:
            _ = target.info
    finally:
        target.close()
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ValueError('two\\nlines')", "raised at import: ValueError: two lines"),
        ("import sys; sys.exit(4)", "raised at import: SystemExit: 4"),
        ("import os; os._exit(4)", "crashed at import: the process ended with exit status 4"),
        ("import absent_dependency", "raised at import: ModuleNotFoundError"),
        ("fn = (", "raised at import: SyntaxError"),
    ],
)
def test_broken_modules_say_why(tmp_path, source, reason):
    (tmp_path / "broken_port.py").write_text(source)
    target = ProcessTarget(
        Launch(kind="callable", name="broken_port:fn", directory=str(tmp_path)), timeout=20
    )
    try:
        with pytest.raises(TargetUnavailable) as caught:
            _ = target.info
    finally:
        target.close()
    assert reason in str(caught.value)


def test_a_target_that_cannot_start_again_fails_the_rest(tmp_path):
    (tmp_path / "once_only.py").write_text(
        "import os, pathlib\n"
        "mark = pathlib.Path(__file__).with_suffix('.mark')\n"
        "assert not mark.exists(), 'started twice'\n"
        "mark.touch()\n"
        "def fn(inputs, config): os._exit(3)\n"
    )
    target = ProcessTarget(Launch(kind="callable", name="once_only:fn", directory=str(tmp_path)), timeout=20)
    try:
        first, second = results(target, make_job(), make_job())
        assert target.info.name == "once_only:fn"
    finally:
        target.close()
    assert first.reason == "the process ended with exit status 3"
    assert second.failure == "crashed"
    assert "cannot be started again" in second.reason
    assert "started twice" in second.reason


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="processes of this system have no groups")
def test_workers_end_with_their_parent(tmp_path):
    """A parent that is killed cleans nothing up; its busy worker has to notice."""
    pid_file = tmp_path / "pid"
    code = (
        "import sys\n"
        "from test_targets import make_job\n"
        "from iha_conformance.targets.messages import Launch\n"
        "from iha_conformance.targets.process import ProcessTarget\n"
        f"launch = Launch(kind='callable', name='fake_targets:hangs', directory={HERE!r})\n"
        "target = ProcessTarget(launch, timeout=600)\n"
        "list(target.evaluate([make_job()]))\n"
    )
    environment = os.environ | {
        "FAKE_PID_FILE": str(pid_file),
        "PYTHONPATH": os.pathsep.join([HERE, *filter(None, sys.path)]),
    }
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        worker = int(wait_for_text(pid_file))
    finally:
        parent.kill()
        parent.wait()
    wait_until_gone(worker)


# Built-in backends


def test_known_names():
    assert known_targets() == ("torch", "jax", "mlx", *(f"array-api:{name}" for name in NAMESPACES))
    assert NAMESPACES == ("numpy", "array_api_strict", "torch")
    for name in ("jax:splash", "array-api", "array-api:anything"):
        assert is_known(name)
    for name in ("jaxx", "jax:", "jax:splashy", "torch:splash", "array-api:"):
        assert not is_known(name)
    assert canonical_name("array-api:array-api-strict") == "array-api:array_api_strict"
    assert canonical_name("array-api") == "array-api"


def test_missing_modules_are_found_out_without_importing():
    assert missing_module("array-api:numpy") is None
    assert missing_module("array-api:no_such_namespace") == "no_such_namespace"
    assert missing_module("array-api:os.path.nothing") is None  # only the worker imports it


def test_unavailable_backends_say_why(launch):
    for name, device, reason in [
        ("array-api:json", None, "expected an Array API namespace"),
        ("array-api:no_such_namespace", None, "No module named 'no_such_namespace'"),
        ("array-api:numpy", "cuda", "expected device cpu, got 'cuda'"),
    ]:
        with pytest.raises(TargetUnavailable) as caught:
            _ = launch(name, kind="backend", device=device).info
        assert reason in str(caught.value)


def test_numpy_backend_end_to_end(launch):
    target = launch("array-api:numpy", kind="backend")
    job = make_job(layout="sliced")
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in job.inputs.items()}
    wide, refused = results(target, job, make_job(dtype="bfloat16", inputs=narrow))
    assert wide.kind == "arrays", wide.reason
    assert wide.repeatable is True
    assert wide.kernel
    assert (refused.kind, refused.reason) == ("refused", "numpy has no bfloat16")
    info = target.info
    assert (info.framework, info.version, info.precision) == ("numpy", np.__version__, "highest")


def test_torch_backend_end_to_end(launch):
    torch = pytest.importorskip("torch")
    target = launch("torch", kind="backend")
    bad = make_job(capability="invalid", extra={"alpha_k": np.zeros((2, 2), np.float32)})
    good, invalid = results(target, make_job(layout="transposed"), bad)
    assert good.kind == "arrays", good.reason
    assert "mixed_q" in good.arrays
    assert good.arrays["output"].dtype == np.float32
    assert "ShapeError" in invalid.error_types
    info = target.info
    assert (info.framework, info.version) == ("torch", torch.__version__)
    assert (info.device, info.precision) == ("cpu", "highest")


@pytest.mark.requirement("NUM-8")
def test_precision_class_is_the_one_in_force(monkeypatch):
    from types import ModuleType

    from iha_conformance.targets.backends import load

    monkeypatch.setitem(sys.modules, "unheard_of", ModuleType("unheard_of"))
    sys.modules["unheard_of"].asarray = np.asarray
    assert load("array-api:unheard_of", None).info.precision == "undeclared"
    assert load("array-api:numpy", None).info.precision == "highest"
    assert load("array-api:array_api_strict", "cpu").info.precision == "highest"
    torch = pytest.importorskip("torch")
    for precision in ("high", "highest"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda chosen=precision: chosen)
        assert load("torch", None).info.precision == precision
        assert load("array-api:torch", None).info.precision == precision


def make_adapter(attention=None, attention_stages=None):
    """An adapter of a backend that is these functions of NumPy arrays."""
    from types import SimpleNamespace

    from iha_conformance.protocol import TargetInfo
    from iha_conformance.targets.backends import BackendAdapter

    info = TargetInfo(name="x", framework="x", version="0", device="cpu", precision="highest")
    package = SimpleNamespace(attention=attention, attention_stages=attention_stages)
    return BackendAdapter(package, NamespaceBridge(np), info)


@pytest.mark.requirement("TYP-1")
def test_output_of_a_backend_has_the_dtype_of_q():
    from iha_conformance.targets.worker import run_job

    def attention_in(dtype):
        return lambda q, **arguments: q.astype(dtype)

    def stages_in(dtype):
        return lambda q, **arguments: ({"output": q.astype(dtype), "lse": np.zeros(1)}, "kernel")

    wide = "TypeError: `output` dtype: expected float32, that of q ([TYP-1]), got float64"
    for plain, detailed, reason in [
        ("float32", "float32", None),
        ("float32", "float64", wide),
        ("float64", "float32", f"second run: {wide}"),
    ]:
        result = run_job(make_adapter(attention_in(plain), stages_in(detailed)), make_job())
        assert (result.kind, result.reason) == ("arrays" if reason is None else "failed", reason)
        assert result.failure == (None if reason is None else "raised")
    accepted = run_job(make_adapter(attention_in("float64")), make_job(capability="invalid"))
    assert (accepted.kind, accepted.error_types) == ("failed", ())
    no_array = make_job(capability="invalid", extra={"q": [1.0]})
    result = run_job(make_adapter(lambda **arguments: np.zeros(1)), no_array)
    assert result.kind == "arrays"  # accepted, as the judge will say


def test_backends_may_not_refuse_by_raising():
    """A backend refuses only what its framework has no dtype for; anything else is a failure."""
    from iha_conformance.targets.worker import run_job

    def attention_stages(**arguments):
        raise NotImplementedError("no kernel for this")

    result = run_job(make_adapter(attention_stages=attention_stages), make_job())
    assert (result.kind, result.failure) == ("failed", "raised")
    assert result.reason == "NotImplementedError: no kernel for this"


def test_bad_input_goes_to_the_function_that_users_call():
    from iha_conformance.targets.worker import run_job

    def attention(**arguments):
        raise ValueError("`q`: no")

    def attention_stages(**arguments):
        raise AssertionError("not what users call")

    adapter = make_adapter(attention, attention_stages)
    assert run_job(adapter, make_job(capability="invalid")).reason == "ValueError: `q`: no"


VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "stepped": lambda x: x[..., ::2],
    "offset": lambda x: x[1:, 2:],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "reversed": lambda x: x[::-1],
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0, ...],
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "bool"])
@pytest.mark.parametrize("view", VIEWS)
def test_torch_bridge_keeps_values_and_strides(view, dtype):
    torch = pytest.importorskip("torch")
    bridge = TorchBridge(torch)
    base = np.arange(24).reshape(4, 6)
    array = VIEWS[view](base.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    native = bridge.to_native(array)
    assert str(native.dtype) == f"torch.{dtype}"
    if view not in ("reversed", "empty"):
        assert native.stride() == tuple(stride // array.itemsize for stride in array.strides)
    back = bridge.to_numpy(native)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_bridges_copy_on_the_way_back():
    torch = pytest.importorskip("torch")
    for bridge in (TorchBridge(torch), NamespaceBridge(np)):
        native = bridge.to_native(np.zeros(3))
        back = bridge.to_numpy(native)
        native[0] = 1
        assert back[0] == 0


def test_namespace_bridge_refuses_what_is_narrowed():
    class Narrow:
        __name__ = "narrow"
        float64 = np.float64

        @staticmethod
        def asarray(array):
            return np.asarray(array, dtype=np.float32)

    with pytest.raises(RefusedError, match="narrow has no float64"):
        NamespaceBridge(Narrow()).to_native(np.zeros(3))


# Reasons


def test_reasons_are_one_readable_line():
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe(ValueError("a\n  b\x1b[31mc")) == "ValueError: a b?[31mc"
    assert describe(KeyError()) == "KeyError"
    assert describe(UnprintableError()) == "UnprintableError: (its message cannot be printed)"
    assert len(one_line("x" * 10_000)) == 500


# JAX


@pytest.fixture
def jax_bridge():
    jax = pytest.importorskip("jax")
    from iha_conformance.targets.jax_bridge import JaxBridge

    return JaxBridge(jax)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32", "bool"])
def test_arrays_pass_through_jax(jax_bridge, dtype):
    array = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for x in (array, array[:, ::2], array[:0]):
        native = jax_bridge.to_native(x)
        assert str(native.dtype) == dtype
        back = jax_bridge.to_numpy(native)
        assert (back.dtype, back.shape) == (x.dtype, x.shape)
        assert np.array_equal(back, x)


def test_integers_that_jax_would_cut_are_refused(jax_bridge):
    assert str(jax_bridge.to_native(np.array([2**31 - 1, -(2**31)])).dtype) == "int32"
    with pytest.raises(RefusedError, match=r"^jax has no int64 unless it is enabled$"):
        jax_bridge.to_native(np.array([2**31]))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_the_output_alone_is_compiled_from_the_code_of_attention(jax_bridge, dtype, normalisation):
    """Where one function serves both runs, it is the function that users call."""
    import jax

    import iha_jax

    name = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    arrays = {key: jax_bridge.to_native(np.ones(shape, dtype=name)) for key, shape in SHAPES.items()}
    config = AttentionConfig(normalisation=normalisation)
    adapter = make_adapter(iha_jax.attention, iha_jax.attention_stages)

    def output(arrays):
        return adapter._output_and_kernel(**arrays, config=config)[0]["output"]

    def attention(arrays):
        return iha_jax.attention(**arrays, config=config)

    with jax.enable_x64(dtype == "float64"):
        texts = [jax.jit(f).lower(arrays).compile().as_text() for f in (output, attention)]
    shared = [re.sub(r'metadata=\{.*?\}|jit_\w+|"[^"]*"', "", text).partition("%")[2] for text in texts]
    assert shared[0] == shared[1]


def test_a_variant_refuses_what_it_does_not_take():
    pytest.importorskip("jax")
    from iha_conformance.targets.backends import load
    from iha_conformance.targets.worker import run_job

    result = run_job(load("jax:splash"), make_job())
    assert result.kind == "refused"
    assert "splash attention: expected N*P and M*P to be multiples of 128" in result.reason


def test_compilations_are_kept_where_the_user_wants_them(tmp_path):
    """In the folder that JAX has been given, or that of the user's caches."""
    pytest.importorskip("jax")
    script = "from iha_conformance.targets.backends import load; load('jax'); import jax; "
    script += "print(jax.config.jax_compilation_cache_dir)"
    for variable, folder in (("JAX_COMPILATION_CACHE_DIR", ""), ("XDG_CACHE_HOME", "/iha/jax")):
        environment = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            variable: str(tmp_path),
            "HOME": str(tmp_path),
        }
        shown = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True
        )
        assert shown.stdout.strip() == f"{tmp_path}{folder}", shown.stderr
