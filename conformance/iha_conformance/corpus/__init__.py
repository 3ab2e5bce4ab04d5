"""The test corpus: the case table, and the inputs that its rows describe."""

from iha_conformance.corpus.cases import Case, load_cases
from iha_conformance.corpus.inputs import build_inputs, corpus_sha256
from iha_conformance.corpus.layouts import apply_layout

__all__ = ["Case", "apply_layout", "build_inputs", "corpus_sha256", "load_cases"]
