"""The test corpus: the case table, the inputs that its rows describe, and the hashes they must have."""

from iha_conformance.corpus.cases import Case, load_cases
from iha_conformance.corpus.frozen import CorpusError, check_frozen, corpus_sha256
from iha_conformance.corpus.inputs import build_inputs
from iha_conformance.corpus.layouts import apply_layout

__all__ = [
    "Case",
    "CorpusError",
    "apply_layout",
    "build_inputs",
    "check_frozen",
    "corpus_sha256",
    "load_cases",
]
