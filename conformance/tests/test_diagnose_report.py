"""A diagnosis as people read it, and as JSON by its schema."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from iha_conformance.diagnose.diagnosis import Diagnosis, Example, Nearest, Refusal
from iha_conformance.diagnose.dialect import AXES, NUMBERS, Dialect, Scale
from iha_conformance.protocol import TargetInfo
from iha_conformance.report.diagnosis import OF_STAGE, as_json, print_diagnosis
from iha_core import STAGES, AttentionConfig
from iha_core.spec_files import spec_path

SCHEMA = json.loads(spec_path("schemas/diagnose.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
SPEC = spec_path("SPEC.md").read_text(encoding="utf-8")
INFO = TargetInfo(
    name="port:attention", framework="function", version="0.1", device="cpu", precision="undeclared"
)
CONFIG = AttentionConfig().to_dict()


def diagnosis(
    spoken: Dialect, *, unsure: tuple[str, ...] = (), asked: Dialect | None = None, **fields: Any
) -> Diagnosis:
    """A match in which all axes but these are certain."""
    certain = {name: value for name, value in spoken.axes().items() if name not in unsure}
    defaults: dict[str, Any] = {
        "matched": True,
        "found": spoken,
        "certain": certain,
        "possible": {},
        "calls": 42,
    }
    of = {"dtype": "float64", "config": CONFIG, "asked": asked or Dialect(), "P": 3, "per_head": False}
    return Diagnosis(info=INFO, **of | defaults | fields)


def example(stage: str = "logits") -> Example:
    inputs = {
        "q": np.ones((1, 1, 1, 2), np.float32),
        "key_mask": np.array([[True, False]]),
        "query_offset": np.int64(1),
    }
    found = np.array([[[[0.5, np.nan, -np.inf]]]])
    return Example(
        stage=stage, inputs=inputs, config=CONFIG, expected=np.array([[[[0.5, 1.0, -np.inf]]]]), found=found
    )


CANONICAL = diagnosis(Dialect())
DEVIATING = diagnosis(
    Dialect(alpha_q_axes="target,source,pseudo", causal="token", rope_sign=-1, scale=Scale(0.5, 0.0)),
    unsure=("order", "window_unit", "window_bound", "qk_multiplier"),
    possible={"order": ("token_major", "reshaped"), "qk_multiplier": (1.0,)},
    follows=("rope_theta", "rope_pairing"),
    ignores=("segment_ids",),
    refuses=(
        Refusal(what="window", reason="no windows", said=True),
        Refusal(what="G < H", reason="", said=True),
    ),
    unexplained=("alignment",),
    notes=("second run differs in bits",),
)
ASTRAY = diagnosis(
    Dialect(),
    matched=False,
    found=None,
    certain={"alpha_q_axes": "target,source,pseudo", "scale": 0.35, "rope": "virtual"},
    possible={"causal": ("virtual", "token")},
    first_bad_stage="logits",
    nearest=Nearest(
        dialect=Dialect(order="reshaped", key_mask="ignored"), error=0.0312, agrees=12, answered=40
    ),
    example=example(),
)
UNKNOWN = dataclasses.replace(
    ASTRAY, first_bad_stage=None, nearest=None, example=None, certain={}, possible={}
)
MENDABLE = diagnosis(Dialect(alpha_k_axes="pseudo,target,source", rope_pairing="adjacent", key_mask="drop"))
ALL = {
    "canonical": CANONICAL,
    "deviating": DEVIATING,
    "astray": ASTRAY,
    "unknown": UNKNOWN,
    "mendable": MENDABLE,
}
EACH = pytest.mark.parametrize("name", ALL)


def to_json(one: Diagnosis) -> dict[str, Any]:
    document = as_json(one, spec_version="1.1")
    return json.loads(json.dumps(document, allow_nan=False))


def text_of(one: Diagnosis, *, fix: bool = False, encoding: str = "utf-8") -> str:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding)
    print_diagnosis(stream, one, spec_version="1.1", fix=fix)
    stream.flush()
    return buffer.getvalue().decode(encoding)


def lines_of(one: Diagnosis, *, fix: bool = False) -> list[str]:
    return text_of(one, fix=fix).splitlines()


# JSON


@EACH
def test_json_fits_its_schema(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    VALIDATOR.validate(to_json(ALL[name]))


def test_json_of_a_match():
    document = to_json(DEVIATING)
    assert list(document)[:6] == ["spec_version", "target", "dtype", "config", "matched", "canonical"]
    assert document["target"] == dataclasses.asdict(INFO)
    assert (document["matched"], document["canonical"], document["calls"]) == (True, False, 42)
    assert list(document["dialect"]) == list(AXES)
    assert document["dialect"]["alpha_q_axes"] == "target,source,pseudo"
    assert document["dialect"]["rope_sign"] == -1
    assert document["dialect"]["scale"] == 0.5
    assert document["ambiguous"] == ["order", "window_unit", "window_bound", "qk_multiplier"]
    assert all(document["dialect"][axis] is None for axis in document["ambiguous"])
    assert document["possible"] == {"order": ["token_major", "reshaped"]}
    assert document["follows"] == ["rope_theta", "rope_pairing"]
    assert document["ignores"] == ["segment_ids"]
    assert document["refuses"] == [
        {"what": "window", "reason": "no windows", "said": True},
        {"what": "G < H", "reason": "", "said": True},
    ]
    assert document["unexplained"] == ["alignment"]
    assert document["notes"] == ["second run differs in bits"]
    assert document["nearest"] is document["first_bad_stage"] is document["example"] is None
    fix = document["fix"]
    assert (fix["complete"], fix["without"]) == (False, ["causal"])
    assert [step["axis"] for step in fix["steps"]] == ["scale", "alpha_q_axes", "rope_sign"]
    assert fix["steps"][1] == {
        "axis": "alpha_q_axes",
        "numpy": ["alpha_q = alpha_q.transpose(1, 0, 2)"],
        "checkpoint": ['weights["alpha_q"] = weights["alpha_q"].transpose(1, 0, 2)'],
    }


def test_json_of_no_match():
    document = to_json(ASTRAY)
    assert (document["matched"], document["canonical"]) == (False, False)
    assert document["first_bad_stage"] == "logits"
    near = document["nearest"]
    assert (near["error"], near["agrees"], near["answered"]) == (0.0312, 12, 40)
    assert list(near["dialect"]) == list(AXES)
    assert near["dialect"]["order"] == "reshaped"
    assert near["dialect"]["key_mask"] is None  # "ignored" is no value of the axis
    assert document["possible"] == {"causal": ["virtual", "token"]}
    shown = document["example"]
    assert (shown["stage"], shown["config"]) == ("logits", CONFIG)
    assert shown["found"] == {
        "dtype": "float64",
        "shape": [1, 1, 1, 3],
        "cut": False,
        "values": [0.5, "nan", "-inf"],
    }
    assert shown["inputs"]["key_mask"]["values"] == [True, False]
    assert shown["inputs"]["query_offset"] == 1
    assert document["fix"]["complete"] is False


def test_fix_says_whether_it_is_enough():
    assert to_json(CANONICAL)["fix"] is None
    assert to_json(UNKNOWN)["fix"] is None
    fix = to_json(MENDABLE)["fix"]
    assert (fix["complete"], fix["without"]) == (True, [])
    assert [step["axis"] for step in fix["steps"]] == ["alpha_k_axes", "rope_pairing", "key_mask"]
    assert fix["steps"][2]["checkpoint"] == []


def test_an_error_without_bound_is_null():
    near = dataclasses.replace(ASTRAY.nearest, error=float("inf"))
    document = to_json(dataclasses.replace(ASTRAY, nearest=near))
    assert document["nearest"]["error"] is None
    VALIDATOR.validate(document)


def _objects(value, path=()):
    if isinstance(value, dict):
        yield path
        for key, item in value.items():
            yield from _objects(item, (*path, key))
    if isinstance(value, list):
        for index, item in enumerate(value[:1]):
            yield from _objects(item, (*path, index))


def _at(document, path):
    for step in path:
        document = document[step]
    return document


@pytest.mark.parametrize("name", ["deviating", "astray"])
def test_schema_is_closed_and_every_key_is_required(name):
    document = to_json(ALL[name])
    free = [("possible",), ("example", "inputs")]  # whose keys are names, any of them
    paths = list(_objects(document))
    assert len(paths) > 6
    for path in paths:
        more = copy.deepcopy(document)
        _at(more, path)["surprise"] = 1
        assert not VALIDATOR.is_valid(more)
        for key in _at(document, path):
            less = copy.deepcopy(document)
            del _at(less, path)[key]
            assert VALIDATOR.is_valid(less) == (path in free), key


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec_version",), "1"),
        (("dtype",), "int8"),
        (("matched",), None),
        (("dialect", "order"), "sideways"),
        (("dialect", "alpha_q_axes"), "out,source,pseudo"),
        (("dialect", "rope_sign"), "-1"),
        (("dialect", "scale"), 0),
        (("ambiguous",), ["colour"]),
        (("possible",), {"order": ["token_major"]}),
        (("first_bad_stage",), "weights"),
        (("nearest", "error"), "inf"),
        (("nearest", "agrees"), -1),
        (("example", "stage"), None),
        (("example", "found", "values"), ["infinity"]),
        (("example", "config", "window"), 0),
        (("calls",), 1.5),
        (("fix", "without"), ["colour"]),
        (("fix", "steps", 0, "numpy"), []),
    ],
)
def test_schema_refuses_wrong_values(path, value):
    document = to_json(ASTRAY)
    assert VALIDATOR.is_valid(document)
    _at(document, path[:-1])[path[-1]] = value
    assert not VALIDATOR.is_valid(document)


def test_schema_has_the_axes_of_the_kit():
    defs = SCHEMA["$defs"]
    assert defs["axis"]["enum"] == defs["dialect"]["required"] == list(AXES)
    for name, axis in AXES.items():
        said = defs["dialect"]["properties"][name]
        if "$ref" in said:
            said = defs[said["$ref"].rpartition("/")[2]]
        if name in NUMBERS:
            assert said == defs["positive"]
        else:
            assert said["enum"] == [*axis.values, None], name
    assert defs["stage"]["enum"] == list(STAGES)
    exchange = json.loads(spec_path("schemas/exchange.schema.json").read_text(encoding="utf-8"))
    assert defs["config"] == exchange["properties"]["config"]


# Text


def test_first_lines_say_who_was_asked_how_and_the_verdict():
    lines = lines_of(CANONICAL)
    assert lines[0] == "port:attention: function 0.1, cpu, precision undeclared"
    assert lines[1].startswith("asked in float64, 42 calls answered; causal='virtual', window=None, ")
    assert lines[2] == "P = 3 and a collapse of shape (H, H, P) unless said otherwise"
    assert lines[4].startswith("It speaks the canonical dialect: all axes are as IHA 1.1 has them. That is ")
    assert lines[5].startswith("It agrees on alpha_q_axes, alpha_k_axes, ")
    assert lines[-1] == "IHA 1.1, diagnose: canonical"
    per_head = diagnosis(Dialect(collapse_kind="per_head"), per_head=True, P=1, calls=1)
    assert lines_of(per_head)[2] == "P = 1 and a collapse of shape (H, P) unless said otherwise"
    assert "1 call answered" in lines_of(per_head)[1]
    some = diagnosis(Dialect(), unsure=("key_mask",))
    assert "all 20 axes that could be told are" in lines_of(some)[4]


def test_what_deviates_has_a_paragraph_each():
    lines = lines_of(DEVIATING)
    assert lines[4] == (
        "It speaks a dialect of the operation that deviates from IHA 1.1 on 4 of 21 axes: alpha_q_axes,"
        " causal, scale and rope_sign."
    )
    assert "It follows the configuration in rope_theta, rope_pairing." in lines
    agreed = next(line for line in lines if line.startswith("It agrees on "))
    assert "alpha_k_axes" in agreed
    assert "alpha_q_axes" not in agreed
    assert "order" not in agreed
    at = lines.index("DEVIATES alpha_q_axes [MIX-1] [DIM-1]")
    assert lines[at + 1 : at + 4] == [
        "  port     alpha_q is read as [target, source, pseudo]",
        "  SPEC.md  alpha_q is read as [source, target, pseudo]",
        "  weights  the same numbers, stored otherwise: transpose alpha_q",
    ]
    assert lines[at + 4].startswith("  mend     Sum the first axis of alpha_q against the heads of q")
    assert [line.split()[1] for line in lines if line.startswith("DEVIATES")] == [
        "alpha_q_axes",
        "causal",
        "scale",
        "rope_sign",
    ]
    assert lines[-1] == (
        "IHA 1.1, diagnose: a dialect: deviates in alpha_q_axes, causal, scale, rope_sign; ignores"
        " segment_ids; unexplained: alignment"
    )
    assert "NOTE second run differs in bits" in lines


def test_ignoring_is_not_allowed_and_refusing_is():
    lines = lines_of(DEVIATING)
    (ignored,) = [line for line in lines if line.startswith("IGNORES")]
    assert ignored.startswith("IGNORES segment_ids: given, without effect; follow or raise NotImplemented")
    assert "REFUSES window, as a port may [ERR-2]: no windows" in lines
    assert any(line.startswith("UNEXPLAINED alignment: ") for line in lines)


def test_ambiguity_is_explained():
    lines = [line for line in lines_of(DEVIATING) if line.startswith("AMBIGUOUS")]
    assert lines == [
        "AMBIGUOUS order (token_major or reshaped): no call that it answered tells these apart, so the same"
        " outputs come either way",
        "AMBIGUOUS window_unit, window_bound: it refuses window, so there is nothing to tell",
        "AMBIGUOUS qk_multiplier: without a QK norm a multiplier counts as scale, so every value gives the"
        " same results",
    ]


@pytest.mark.parametrize(
    ("values", "axis", "reason"),
    [
        ({"rope": "none"}, "rope_sign", "nothing is rotated"),
        ({"rope": "token"}, "rope_when", "rotating all pseudo-heads of a token alike commutes with mixing"),
        ({"collapse_kind": "last"}, "collapse_axes", "no collapse is read"),
        ({"values": "unmixed"}, "alpha_v_axes", "alpha_v is not read"),
    ],
)
def test_axes_without_effect_say_why(values, axis, reason):
    (line,) = [line for line in lines_of(diagnosis(Dialect(**values), unsure=(axis,))) if "AMBIGUOUS" in line]
    assert line == f"AMBIGUOUS {axis}: {reason}, so every value gives the same results"
    told = diagnosis(Dialect(), unsure=(axis,))
    assert not any(reason in line for line in lines_of(told))


@pytest.mark.parametrize(
    ("axis", "fields", "reason"),
    [
        ("alignment", {"refuses": (Refusal(what="N < M", reason="no", said=True),)}, "it refuses N < M"),
        ("key_mask", {"ignores": ("key_mask",)}, "it ignores key_mask"),
    ],
)
def test_what_is_not_taken_cannot_be_told(axis, fields, reason):
    lines = lines_of(diagnosis(Dialect(), unsure=(axis,), **fields))
    assert f"AMBIGUOUS {axis}: {reason}, so there is nothing to tell" in lines


def test_one_pseudo_head_tells_little():
    one = diagnosis(
        Dialect(), unsure=("order",), refuses=(Refusal(what="P > 1", reason="one only", said=True),)
    )
    assert any(line.startswith("AMBIGUOUS order: with P = 1, ") for line in lines_of(one))


def test_no_match_shows_where_it_goes_astray():
    lines = lines_of(ASTRAY)
    assert lines[4] == (
        "No dialect of the operation explains what it answers: the first stage that is wrong under every one"
        " of them is logits."
    )
    assert "It certainly agrees on rope." in lines
    assert "DEVIATES alpha_q_axes [MIX-1] [DIM-1]" in lines
    at = lines.index("NEAREST the canonical dialect with order reshaped, key_mask ignored")
    assert lines[at + 1].strip() == (
        "it explains 12 of 40 calls; the largest error is 0.0312 x the largest output of its call"
    )
    assert "FIRST BAD STAGE logits [LOG-1] [LOG-2] [LOG-3]" in lines
    at = lines.index("EXAMPLE of logits, to be checked by hand")
    assert lines[at + 1].startswith("  causal='virtual', window=None")
    rest = "\n".join(lines[at:])
    assert "  q float32 (1, 1, 1, 2)\n" in rest
    assert "  query_offset = 1\n" in rest
    assert (
        "  expected logits float64 (1, 1, 1, 3)\n    [[[[         0.5            1         -inf]]]]\n" in rest
    )
    assert "  found logits float64 (1, 1, 1, 3)\n    [[[[         0.5          nan         -inf]]]]\n" in rest
    assert "same results" not in rest
    assert any(line.startswith("AMBIGUOUS") and "causal (virtual or token)" in line for line in lines)
    assert lines[-1] == "IHA 1.1, diagnose: no dialect: first bad stage logits"


def test_no_match_of_a_port_that_gives_only_the_output():
    lines = lines_of(UNKNOWN)
    assert lines[4] == "No dialect of the operation explains what it answers."
    assert any(line.startswith("FIRST BAD STAGE unknown: ") for line in lines)
    assert lines[-1] == (
        "IHA 1.1, diagnose: no dialect: first bad stage unknown, only the output is known to be wrong"
    )


def test_fix_is_printed_where_asked_for():
    assert not any("FIX" in line for one in ALL.values() for line in lines_of(one))
    lines = lines_of(MENDABLE, fix=True)
    first, second = (i for i, line in enumerate(lines) if line.startswith("FIX"))
    assert [line.strip() for line in lines[first + 2 : second]] == [
        "# alpha_k_axes",
        "alpha_k = alpha_k.transpose(2, 1, 0)",
        "# rope_pairing",
        "lanes = np.arange(d).reshape(2, d // 2).T.ravel()",
        "q, k = q[..., lanes], k[..., lanes]",
        "# key_mask",
        "key_mask = ~key_mask",
    ]
    assert '  weights["k_proj.weight"] = weights["k_proj.weight"][rows[1]]' in lines[second:]
    assert lines[-1].startswith("IHA 1.1, diagnose: a dialect: ")


@pytest.mark.parametrize(
    ("one", "start"),
    [
        (CANONICAL, "FIX none needed"),
        (UNKNOWN, "FIX none: no axis is certain to deviate."),
        (MENDABLE, "FIX for the arguments: after these lines"),
        (DEVIATING, "FIX for the arguments, in part: nothing makes up for causal; "),
        (
            diagnosis(Dialect(alignment="first")),
            "FIX for the arguments: after these lines, in this order, the port gives the canonical output if"
            " it takes query_offset, which was not tried",
        ),
        (ASTRAY, "FIX for the arguments, in part: for the axes that are certain"),
        (diagnosis(Dialect(causal="none")), "FIX none: no weights make up for causal; mend the port."),
    ],
)
def test_fix_says_how_far_it_reaches(one, start):
    assert any(line.startswith(start) for line in lines_of(one, fix=True))


def test_arguments_alone_need_no_checkpoint():
    lines = lines_of(diagnosis(Dialect(key_mask="drop")), fix=True)
    assert "FIX for a checkpoint: none, only arguments change." in lines
    assert not any("weights[" in line for line in lines)


def test_all_values_left_are_any():
    one = diagnosis(Dialect(), unsure=("order",), possible={"order": AXES["order"].values})
    assert any(line.startswith("AMBIGUOUS order (any): ") for line in lines_of(one))


@EACH
@pytest.mark.parametrize("fix", [False, True])
def test_text_is_plain_everywhere(name, fix):
    text = text_of(ALL[name], fix=fix, encoding="ascii")
    assert "\x1b" not in text
    assert "\\" not in text
    assert text.endswith("\n")


def test_a_missing_stream_is_no_fault():
    print_diagnosis(None, ASTRAY, spec_version="1.1", fix=True)


def test_names_are_not_taken_for_markup():
    one = dataclasses.replace(CANONICAL, info=dataclasses.replace(INFO, name="[red]x[/red] :smile:"))
    assert lines_of(one)[0].startswith("[red]x[/red] :smile:: ")


def test_requirements_that_are_named_exist():
    assert list(OF_STAGE) == list(STAGES)
    names = {name for of in OF_STAGE.values() for name in of} | {
        name for axis in AXES.values() for name in axis.requirements
    }
    for name in names | {"ERR-2"}:
        assert f"[{name}]" in SPEC, name
