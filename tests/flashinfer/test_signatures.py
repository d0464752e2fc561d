"""Signatures in FlashInfer's sources compared with their replacements: arguments, their order and defaults.

The sources are read, not imported; ``.ci/peers.py`` fetches them.
"""

# Trees of known shape are read.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import ast
import importlib
import inspect

import pytest
from support.peer_sources import MISSING, folders

from flashlatte import flashinfer

# Functions by file; methods by class.
PLACES = {
    "mla/_core.py": (
        "BatchMLAPagedAttentionWrapper.__init__",
        "BatchMLAPagedAttentionWrapper.plan",
        "BatchMLAPagedAttentionWrapper.run",
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache_mla",
    ),
    "cascade.py": ("merge_state", "merge_state_in_place", "merge_states"),
    "concat_ops.py": ("concat_mla_k",),
    "page.py": ("append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    "prefill.py": (
        "BatchPrefillWithRaggedKVCacheWrapper.__init__",
        "BatchPrefillWithRaggedKVCacheWrapper.plan",
        "BatchPrefillWithRaggedKVCacheWrapper.run",
    ),
    "topk.py": ("top_k", "top_k_page_table_transform", "top_k_ragged_transform"),
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
FUNCTIONS = [(place, name) for place, names in PLACES.items() for name in names]


def test_every_function_has_a_counterpart():
    ours = {name for name in flashinfer.__all__ if callable(getattr(flashinfer, name))}
    assert ours == {name.partition(".")[0] for _, name in FUNCTIONS} | {"TopKTieBreak"}


@pytest.mark.parametrize(("place", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_modules_have_flashinfers_names(place, name):
    module = importlib.import_module(f"flashlatte.flashinfer.{place.partition('/')[0].removesuffix('.py')}")
    public = name.partition(".")[0]
    assert getattr(module, public) is getattr(flashinfer, public)


def definition(tree, name):
    """The last definition of a function or method: those before it are overloads."""
    body = tree.body
    *owners, function = name.split(".")
    for owner in owners:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    return [node for node in body if isinstance(node, ast.FunctionDef) and node.name == function][-1].args


@pytest.mark.skipif(not folders("flashinfer-python"), reason=MISSING)
@pytest.mark.parametrize("source", folders("flashinfer-python"), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("place", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_arguments_are_flashinfers(source, place, name):
    theirs = definition(ast.parse((source / "flashinfer" / place).read_text()), name)
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
    assert {argument for argument, p in parameters.items() if p.kind is kinds.KEYWORD_ONLY} == {
        argument.arg for argument in theirs.kwonlyargs
    }
    assert (theirs.vararg is not None) == any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values())
    defaults = dict(zip(reversed(names), reversed(theirs.defaults), strict=False))
    defaults |= {argument.arg: default for argument, default in zip(theirs.kwonlyargs, theirs.kw_defaults, strict=True)}
    assert {argument for argument, p in parameters.items() if p.default is not p.empty} == set(defaults)
    for argument, default in defaults.items():
        expected = ast.literal_eval(default) if not isinstance(default, ast.Attribute) else 0
        assert parameters[argument].default == expected, argument


@pytest.mark.skipif(not folders("flashinfer-python"), reason=MISSING)
def test_ties_are_broken_by_the_same_numbers():
    tree = ast.parse((folders("flashinfer-python")[-1] / "flashinfer" / "topk.py").read_text())
    (enum,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TopKTieBreak")
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in enum.body if isinstance(node, ast.Assign)}
    assert values == {member.name: member.value for member in flashinfer.TopKTieBreak}
