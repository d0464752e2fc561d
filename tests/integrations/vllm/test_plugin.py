"""The plugin without vLLM: registration, configuration of models, and conversion of fake metadata."""

import logging
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from flashlatte.integrations import vllm
from flashlatte.integrations.vllm import compat, support


@pytest.fixture
def installed(monkeypatch):
    """Sets the installed vLLM version, and collects registrations."""
    registered, configured = [], []
    monkeypatch.setattr(compat, "register_attention", lambda name, path: registered.append((name, path)))
    monkeypatch.setattr(compat, "register_prefill", lambda name, path: registered.append((name, path)))
    monkeypatch.setattr(compat, "configure_models", lambda architectures, **hooks: configured.extend(architectures))
    monkeypatch.delenv("FLASHLATTE_VLLM", raising=False)
    compat.warn_once.cache_clear()

    def install(version):
        monkeypatch.setattr(compat, "version", lambda: version)
        return registered

    return install


@pytest.mark.parametrize("version", ["0.20.2", "0.26.0", "0.32.0", "0.33.1.dev7+g1234"])
def test_registers_with_supported_versions(installed, version):
    registered = installed(version)
    vllm.register()
    vllm.register()
    assert set(registered) == {("CUSTOM", vllm.CUSTOM), ("CUSTOM", vllm.PREFILL)}


def test_takes_over_the_automatic_choice(installed, monkeypatch):
    registered = installed("0.26.0")
    monkeypatch.setenv("FLASHLATTE_VLLM", "auto")
    vllm.register()
    names = {name for name, path in registered if path == vllm.DENSE}
    assert names == set(compat.AUTOMATIC_DENSE)
    assert "TRITON_MLA" not in names


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "vLLM is not installed"),
        ("0.19.1", "it supports vLLM 0.20 to 0.33, and 0.19.1 is installed"),
        ("0.34.0", "it supports vLLM 0.20 to 0.33, and 0.34.0 is installed"),
        ("dev", "it supports vLLM 0.20 to 0.33, and dev is installed"),
    ],
)
def test_warns_once_that_nothing_is_registered(installed, caplog, version, message):
    registered = installed(version)
    with caplog.at_level(logging.WARNING, logger=compat._logger.name):
        compat._logger.propagate, before = True, compat._logger.propagate
        vllm.register()
        vllm.register()
        compat._logger.propagate = before
    assert registered == []
    assert caplog.messages == [f"FlashLatte is not registered: {message}"]


def test_a_mode_that_does_not_exist(installed, monkeypatch):
    installed("0.26.0")
    monkeypatch.setenv("FLASHLATTE_VLLM", "on")
    with pytest.raises(ValueError, match="FLASHLATTE_VLLM must be custom or auto, got 'on'"):
        vllm.register()


@pytest.fixture
def configurations(monkeypatch):
    """vLLM's table of model configuration functions, and the record of their calls."""
    done = []

    class VerifyAndUpdateConfig:
        @staticmethod
        def verify_and_update_config(vllm_config):
            done.append("base")

    class OfV4(VerifyAndUpdateConfig):
        @classmethod
        def verify_and_update_config(cls, vllm_config):
            done.append(cls.__name__)

        @staticmethod
        def verify_and_update_model_config(model_config):
            done.append(model_config)

    path = "vllm.model_executor.models.config"
    for end in range(1, 5):
        monkeypatch.setitem(sys.modules, ".".join(path.split(".")[:end]), types.ModuleType("stand_in"))
    table = {"DeepseekV4ForCausalLM": OfV4, "Other": VerifyAndUpdateConfig}
    vars(sys.modules[path]).update(VerifyAndUpdateConfig=VerifyAndUpdateConfig, MODELS_CONFIG_MAP=table)
    return table, done


def _with_backend(name):
    backend = None if name is None else SimpleNamespace(name=name)
    return SimpleNamespace(attention_config=SimpleNamespace(backend=backend))


def refuse_v41(config, _):
    support.refuse(config, support.V41_UNSUPPORTED)


def test_models_without_a_backend_option_are_refused(configurations):
    table, done = configurations
    compat.configure_models(support.V41_MODELS, before=refuse_v41)
    for architecture in support.V41_MODELS:
        with pytest.raises(ValueError, match=r"CUSTOM is FlashLatte: DeepSeek-V4\.1 runs with vLLM's own"):
            table[architecture].verify_and_update_config(_with_backend("CUSTOM"))
    assert done == []


def test_v4_uses_flashlatte_if_it_is_selected(configurations, monkeypatch):
    table, done = configurations
    monkeypatch.setattr(compat, "v4_refusal", lambda: None)
    monkeypatch.setattr(compat, "on_cuda", lambda: True)
    monkeypatch.setattr(compat, "converts_e4m3", lambda: True)
    compat.configure_models(support.V4_MODELS, before=vllm.configure_v4_model)
    made = "flashlatte.integrations.vllm.backends.models_v4:{}"
    for name, overrides in (("CUSTOM", True), (None, False), ("FLASHMLA_SPARSE", False)):
        for architecture in support.V4_MODELS:
            config = _with_backend(name)
            config.model_config = SimpleNamespace(model_class_overrides={})
            table[architecture].verify_and_update_config(config)
            expected = {architecture: made.format(architecture)} if overrides else {}
            assert config.model_config.model_class_overrides == expected
    assert done.count("OfV4") == 3

    monkeypatch.setattr(compat, "converts_e4m3", lambda: False)
    with pytest.raises(
        ValueError, match=r"CUSTOM is FlashLatte: DeepSeek-V4 is supported from compute capability 8\.9"
    ):
        table["DeepseekV4ForCausalLM"].verify_and_update_config(_with_backend("CUSTOM"))
    monkeypatch.setattr(compat, "on_cuda", lambda: False)
    with pytest.raises(ValueError, match="CUSTOM is FlashLatte: DeepSeek-V4 is supported on CUDA only"):
        table["DeepseekV4ForCausalLM"].verify_and_update_config(_with_backend("CUSTOM"))
    monkeypatch.setattr(compat, "v4_refusal", lambda: "it is too old")
    with pytest.raises(ValueError, match="CUSTOM is FlashLatte: it is too old"):
        table["DeepseekV4ForCausalLM"].verify_and_update_config(_with_backend("CUSTOM"))


def test_dots3_is_refused_if_flashlatte_is_selected(configurations):
    """Its layers name their attention classes: CUSTOM would be ignored."""
    table, done = configurations
    compat.configure_models(support.DOTS3_MODELS, before=lambda c, _: support.refuse(c, support.DOTS3_UNSUPPORTED))
    (architecture,) = support.DOTS3_MODELS
    with pytest.raises(ValueError, match="CUSTOM is FlashLatte: dots3's layers use vLLM's own attention classes"):
        table[architecture].verify_and_update_config(_with_backend("CUSTOM"))
    table[architecture].verify_and_update_config(_with_backend("TRITON_MLA"))
    assert done == ["base"]


def test_a_configuration_is_changed_once(configurations):
    table, done = configurations
    every = (*support.V4_MODELS, *support.V41_MODELS)
    compat.configure_models(every, before=refuse_v41)
    before = dict(table)
    compat.configure_models(every, before=refuse_v41)
    assert table == before
    table["DeepseekV4ForCausalLM"].verify_and_update_config(_with_backend(None))
    table["DeepseekV41ForCausalLM"].verify_and_update_config(_with_backend("FLASHMLA_SPARSE"))
    table["DeepseekV4ForCausalLM"].verify_and_update_model_config("of the model")
    assert done == ["OfV4", "base", "of the model"]


def test_the_platform_needs_the_variable(installed, monkeypatch):
    installed("0.32.0")
    monkeypatch.delenv("FLASHLATTE_VLLM_CPU", raising=False)
    assert vllm.cpu_platform() is None
    monkeypatch.setenv("FLASHLATTE_VLLM_CPU", "1")
    assert vllm.cpu_platform() == vllm.CPU_PLATFORM


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.20.2", "its CPU platform supports vLLM 0.32 and later, and 0.20.2 is installed"),
        ("0.26.0", "its CPU platform supports vLLM 0.32 and later, and 0.26.0 is installed"),
        ("0.40.0", "it supports vLLM 0.20 to 0.33, and 0.40.0 is installed"),
        (None, "vLLM is not installed"),
    ],
)
def test_older_vllms_keep_their_platform(installed, monkeypatch, version, message):
    installed(version)
    monkeypatch.setenv("FLASHLATTE_VLLM_CPU", "1")
    said = []
    monkeypatch.setattr(compat, "warn_once", lambda *words: said.append(words))
    assert vllm.cpu_platform() is None
    assert said == [("FlashLatte has no platform for CPUs: %s", message)]


@pytest.mark.full
def test_entry_points_import_neither_vllm_nor_triton():
    """vLLM loads them in every process, also if FlashLatte is not used."""
    code = (
        "import sys, flashlatte.integrations.vllm as p; p.cpu_platform(); print({'vllm', 'triton'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def _prefill(**context):
    return SimpleNamespace(
        query_start_loc=torch.tensor([0, 3, 7]),
        max_query_len=4,
        block_table=torch.arange(8).view(2, 4),
        chunked_context=SimpleNamespace(workspace=torch.empty(2, 576), **context) if context else None,
    )


def test_a_prefill_without_context():
    part = compat.prefill_part(_prefill(), 7)
    assert (part.max_queries, part.chunks, part.workspace) == (4, (), None)


def test_context_as_lists():
    """vLLM 0.20 and 0.26: a chunk covers all requests."""
    lists = {
        "seq_tot": [5, 2],
        "max_seq_lens": [3, 2],
        "cu_seq_lens": torch.tensor([[0, 3, 5], [0, 2, 2]]),
        "starts": torch.tensor([[0, 0], [3, 3]]),
    }
    first, second = compat.prefill_part(_prefill(**lists), 7).chunks
    assert (first.first, first.last, first.tokens, first.max_queries, first.max_keys) == (0, 7, 5, 4, 3)
    assert (second.cu_keys.tolist(), second.starts.tolist(), second.block_table.shape) == ([0, 2, 2], [3, 3], (2, 4))


def test_context_as_objects():
    """vLLM 0.32 and 0.33: a chunk covers some of the requests."""
    chunk = SimpleNamespace(
        request_slice=slice(1, 2),
        token_slice=slice(3, 7),
        num_context_tokens=2,
        cu_seq_lens=torch.tensor([0, 2]),
        starts=torch.tensor([64]),
        query_start_loc=torch.tensor([0, 4]),
        max_query_len=4,
        max_seq_len=2,
    )
    (only,) = compat.prefill_part(_prefill(chunks=[chunk]), 7).chunks
    assert (only.first, only.last, only.tokens, only.max_queries, only.max_keys) == (3, 7, 2, 4, 2)
    assert only.block_table.tolist() == [[4, 5, 6, 7]]
    assert only.cu_queries is chunk.query_start_loc


@pytest.mark.parametrize(("block_size", "sizes"), [(64, [64]), (256, [64]), (16, ["any"]), (None, ["any"])])
def test_pages(block_size, sizes):
    assert support.page_sizes(block_size, lambda base: "any" if base == 1 else base) == sizes


def test_configurations_without_a_kernel():
    assert support.dense_refusal("cpu", 576, torch.float32, "auto", 64) is None
    assert support.dense_refusal("cuda", 576, torch.bfloat16, "fp8", 16) is None
    mixed = support.dense_refusal("cuda", 576, torch.float16, "bfloat16", None)
    assert mixed == "FlashLatte: a bfloat16 cache takes queries of its own dtype, not float16"
    reason = support.dense_refusal("cuda", 576, torch.float32, None, None)
    assert reason is not None
    assert "it takes bfloat16, float16, not float32" in reason


def test_sparse_configurations_without_a_kernel():
    assert support.sparse_refusal("cpu", 576, torch.float32, "auto", 64) is None
    assert support.sparse_refusal("cuda", 576, torch.bfloat16, "fp8_ds_mla", 64) is None
    assert support.sparse_refusal("cuda", 576, torch.float16, "auto", None) is None
    mixed = support.sparse_refusal("cuda", 576, torch.float16, "bfloat16", None)
    assert mixed == "FlashLatte: a bfloat16 cache takes queries of its own dtype, not float16"
    reason = support.sparse_refusal("cuda", 576, torch.float32, None, None)
    assert reason is not None
    assert "it takes bfloat16, float16, not float32" in reason


def _indexer_config(backend, cache_dtype="auto", **overrides):
    return SimpleNamespace(
        attention_config=_with_backend(backend).attention_config,
        model_config=SimpleNamespace(model_class_overrides=overrides),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )


@pytest.mark.parametrize(("given", "taken"), [("auto", "auto"), ("fp8", "fp8_ds_mla"), ("fp8_e5m2", "fp8_e5m2")])
def test_models_with_an_indexer_use_flashlatte_if_it_is_selected(given, taken):
    for other in (None, "FLASHMLA_SPARSE"):
        config = _indexer_config(other, given)
        vllm.configure_indexer_model(config, "DeepseekV32ForCausalLM")
        assert (config.model_config.model_class_overrides, config.cache_config.cache_dtype) == ({}, given)
    config = _indexer_config("CUSTOM", given)
    vllm.configure_indexer_model(config, "DeepseekV32ForCausalLM")
    name = f"{vllm.MODELS}:DeepseekV32ForCausalLM"
    assert config.model_config.model_class_overrides == {"DeepseekV32ForCausalLM": name}
    assert config.cache_config.cache_dtype == taken


@pytest.mark.parametrize(("backend", "taken"), [("CUSTOM", "fp8_ds_mla"), ("FLASHMLA_SPARSE", "fp8")])
def test_fp8_is_ds_mla_with_vllms_own_indexer_too(configurations, backend, taken):
    table, _ = configurations
    compat.configure_models(support.GLM_NEXT_MODELS, after=vllm.use_ds_mla_cache)
    config = _indexer_config(backend, "fp8")
    table["Glm5NextForCausalLM"].verify_and_update_config(config)
    assert config.cache_config.cache_dtype == taken
    assert config.model_config.model_class_overrides == {}


@pytest.mark.parametrize(
    ("backend", "kinds", "ours"),
    [
        (None, {"mla_attention": "CUSTOM"}, True),
        ("FLASHMLA_SPARSE", {"mla_attention": "CUSTOM"}, True),
        ("CUSTOM", {"mla_attention": "FLASHMLA_SPARSE"}, False),
        ("CUSTOM", {"sliding_window": "FLASH_ATTN"}, True),
        (None, {"sliding_window": "CUSTOM"}, False),
    ],
)
def test_a_backend_for_one_kind_takes_precedence(backend, kinds, ours):
    config = _indexer_config(backend)
    config.attention_config.backend_per_kind = {kind: SimpleNamespace(name=name) for kind, name in kinds.items()}
    vllm.configure_indexer_model(config, "DeepseekV32ForCausalLM")
    assert bool(config.model_config.model_class_overrides) == ours


def test_a_model_class_of_the_user_is_kept():
    config = _indexer_config("CUSTOM", GlmMoeDsaForCausalLM="mine:Model")
    vllm.configure_indexer_model(config, "GlmMoeDsaForCausalLM")
    assert config.model_config.model_class_overrides == {"GlmMoeDsaForCausalLM": "mine:Model"}


def test_caches_that_are_refused():
    with pytest.raises(NotImplementedError, match="dtype auto, bfloat16, float16, fp8, fp8_e4m3, got fp8_e5m2"):
        support.check_layer("fp8_e5m2")


def test_layers_with_options_that_are_refused():
    support.check_layer("auto", sliding_window=None)
    with pytest.raises(NotImplementedError, match="without sliding_window, got 128"):
        support.check_layer("auto", sliding_window=128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress_ratio": 4}, "without compress_ratio, got 4"),
        ({"use_fp4_cache": True}, "without use_fp4_cache, got True"),
        ({"candidate_blocks": torch.zeros(2)}, "without candidate_blocks"),
    ],
)
def test_indexers_that_are_refused(options, message):
    support.check_indexer(compress_ratio=1, use_fp4_cache=False, candidate_blocks=None, candidate_block_size=0)
    with pytest.raises(NotImplementedError, match=message):
        support.check_indexer(**options)


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({}, set()),
        ({"index_topk_freq": 1}, set()),
        ({"index_topk_freq": 2}, {4}),
        ({"index_topk_freq": 3}, {4, 5}),
        # Layers without an indexer do not count.
        ({"index_topk_pattern": "SFSFSS"}, {4, 5}),
        ({"index_topk_pattern": "FFFF", "index_topk_freq": 2}, set()),
    ],
)
def test_v4_layers_that_share_a_selection(options, shared):
    config = SimpleNamespace(compress_ratios=[0, 4, 128, 128, 4, 4, 4], num_hidden_layers=6, **options)
    assert support.v4_shared_layers(config) == shared


def test_v4_layers_that_share_a_selection_in_transformers_configuration():
    """vLLM 0.33 has no configuration of its own, and transformers' does not keep ``compress_ratios``."""
    module = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")
    config = module.DeepseekV4Config(compress_ratios=[0, 4, 128, 4, 4], num_hidden_layers=4, index_topk_freq=2)
    assert support.v4_shared_layers(config) == {3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index_topk_pattern": "FSF"}, "must not be S for layer 1"),
        ({"index_topk_freq": 0}, "index_topk_freq"),
    ],
)
def test_v4_layers_without_a_selection_to_share(options, message):
    config = SimpleNamespace(compress_ratios=[0, 4, 4], num_hidden_layers=3, **options)
    with pytest.raises(ValueError, match=message):
        support.v4_shared_layers(config)
