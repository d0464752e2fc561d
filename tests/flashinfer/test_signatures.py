"""Signatures in FlashInfer's sources compared with their replacements: arguments, their order and defaults.

The sources are read, not imported; ``.ci/peers.py`` fetches them.
"""

# Trees of known shape are read.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import ast
import importlib
import inspect

import pytest
from support.peer_sources import MISSING, definition, folders

from flashlatte import flashinfer

# Functions by file; methods by class. A file and the one before 0.7.4, where they were.
PLACES = {
    ("mla/_batch_mla/_wrapper.py", "mla/_core.py"): (
        "BatchMLAPagedAttentionWrapper.__init__",
        "BatchMLAPagedAttentionWrapper.plan",
        "BatchMLAPagedAttentionWrapper.run",
    ),
    ("mla/_core.py",): (
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache_mla",
    ),
    ("cascade.py",): ("merge_state", "merge_state_in_place", "merge_states"),
    ("concat_ops.py",): ("concat_mla_k",),
    ("page.py",): ("append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    ("prefill.py",): (
        "BatchPrefillWithRaggedKVCacheWrapper.__init__",
        "BatchPrefillWithRaggedKVCacheWrapper.plan",
        "BatchPrefillWithRaggedKVCacheWrapper.run",
    ),
    ("topk.py",): ("top_k", "top_k_page_table_transform", "top_k_ragged_transform"),
}
# Arguments that 0.7.4 added to those of 0.6.15.
LATER = {
    "trtllm_batch_decode_with_kv_cache_mla": (
        "sparse_mla_top_k_lens",
        "enable_dcp",
        "cp_world",
        "cp_rank",
        "causal_seqlens_kv_global",
        "use_fp16_softmax",
        "return_lse_base",
    ),
    "concat_mla_k": ("backend",),
    "BatchPrefillWithRaggedKVCacheWrapper.__init__": ("variant_owns_mask",),
    "BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr_cpu",
        "kv_indptr_cpu",
        "uniform_q_len",
        "use_token_head_sf",
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.run": ("lse_base", "lse_layout"),
    "top_k_page_table_transform": ("page_table_row_starts", "page_size", "out", "out_raw_indices"),
}
# Arguments of 0.7.4 that are a TypeError here: other forms of a plan's tables and of queries and caches.
LEFT_OUT = {
    "BatchMLAPagedAttentionWrapper.plan": {
        *("metadata", "cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len"),
        *("query_layout", "kv_cache_layout", "lse_mode", "output_dtype", "output_scale", "scale_mode", "skip_softmax"),
        *("enable_pdl", "use_sinks"),
    },
    "BatchMLAPagedAttentionWrapper.run": {
        *("query", "kv_cache", "ckv_scale_arr", "sinks", "skip_softmax_threshold_scale_factor"),
        *("bmm1_scale", "bmm2_scale"),
    },
}
FUNCTIONS = [(places, name) for places, names in PLACES.items() for name in names]


def test_every_function_has_a_counterpart():
    ours = {name for name in flashinfer.__all__ if callable(getattr(flashinfer, name))}
    assert ours == {name.partition(".")[0] for _, name in FUNCTIONS} | {"TopKTieBreak"}


@pytest.mark.parametrize(("places", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_modules_have_flashinfers_names(places, name):
    module = importlib.import_module(f"flashlatte.flashinfer.{places[0].partition('/')[0].removesuffix('.py')}")
    public = name.partition(".")[0]
    assert getattr(module, public) is getattr(flashinfer, public)


def test_a_definition_that_moved_is_an_error(tmp_path):
    (tmp_path / "new.py").write_text("class A:\n    def f(self): ...\n    def f(self, x): ...\n")
    assert [argument.arg for argument in definition(tmp_path, ("old.py", "new.py"), "A.f").args] == ["self", "x"]
    for name in ("A.g", "B.f", "f"):
        with pytest.raises(LookupError, match=rf"^{name} of {tmp_path.name} is not in old.py or new.py: it was moved"):
            definition(tmp_path, ("old.py", "new.py"), name)


@pytest.mark.skipif(not folders("flashinfer-python"), reason=MISSING)
@pytest.mark.parametrize("source", folders("flashinfer-python"), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("places", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_arguments_are_flashinfers(source, places, name):
    theirs = definition(source, [f"flashinfer/{place}" for place in places], name)
    left_out = LEFT_OUT.get(name, set())
    ours = flashinfer
    for part in name.split("."):
        ours = getattr(ours, part)
    known = {argument.arg for argument in (*theirs.args, *theirs.kwonlyargs)}
    later = [argument for argument in LATER.get(name, ()) if argument not in known]
    # Later arguments have defaults, and follow those of the same kind.
    parameters = dict(inspect.signature(ours).parameters)
    assert all(parameters.pop(argument).default is not inspect.Parameter.empty for argument in later)
    kinds = inspect.Parameter
    positional = [argument for argument, p in parameters.items() if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    names = [argument.arg for argument in theirs.args]
    assert positional == names
    keywords = {argument.arg for argument in theirs.kwonlyargs} - left_out
    assert {argument for argument, p in parameters.items() if p.kind is kinds.KEYWORD_ONLY} == keywords
    assert (theirs.vararg is not None) == any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values())
    defaults = dict(zip(reversed(names), reversed(theirs.defaults), strict=False))
    defaults |= {argument.arg: default for argument, default in zip(theirs.kwonlyargs, theirs.kw_defaults, strict=True)}
    expected = {
        argument: 0 if isinstance(default, ast.Attribute) else ast.literal_eval(default)
        for argument, default in defaults.items()
        if argument not in left_out
    }
    ours_defaults = {argument: p.default for argument, p in parameters.items() if p.default is not p.empty}
    # What an argument that is left out would replace has the default None there.
    replaced = set(expected) - set(ours_defaults)
    assert all(expected.pop(argument) is None for argument in replaced)
    assert ours_defaults == expected
    assert not replaced or known & left_out


@pytest.mark.skipif(not folders("flashinfer-python"), reason=MISSING)
def test_ties_are_broken_by_the_same_numbers():
    tree = ast.parse((folders("flashinfer-python")[-1] / "flashinfer" / "topk.py").read_text())
    (enum,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TopKTieBreak")
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in enum.body if isinstance(node, ast.Assign)}
    assert values == {member.name: member.value for member in flashinfer.TopKTieBreak}
