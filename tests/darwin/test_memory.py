# SPDX-License-Identifier: Apache-2.0
"""An engine on a Mac with memory used by other programs, under the double."""

import json

import mlx.core as mx
import pytest
from darwin.run import run
from mlx.utils import tree_flatten
from mlx_lm.models import llama

pytestmark = pytest.mark.slow
GIB, MIB = 2**30, 2**20
#: 16 GB, of which psutil sees hardly anything.
SCARCE = {"TOTAL": 16 * GIB, "AVAILABLE": 16 * MIB, "SPECULATIVE": 0, "PURGEABLE": 0}
#: Memory that macOS can still give: files, and programs' pages that it would compress.
PLENTY = {"FILES": 2 * GIB, "LEVEL": 60}
NOTHING = {"FILES": 0, "LEVEL": 0}
#: 320 MiB of the total; the model has less than one.
SERVE = """
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM({folder!r}, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4,
              max_num_batched_tokens=64, gpu_memory_utilization=0.02)
    params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{{"prompt_token_ids": [1, 2, 3]}}], params, use_tqdm=False)
    print("tokens:", len(output.outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    path = folder / "serve.py"
    path.write_text(SERVE.format(folder=str(folder)))
    return path


def serve(script, figures):
    variables = {f"DARWIN_DOUBLE_{name}": str(value) for name, value in figures.items()}
    return run([script], timeout=240, **variables)


def test_a_low_available_still_loads_the_model(script):
    done = serve(script, SCARCE | PLENTY)
    assert "tokens: 4" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_where_macos_has_nothing_to_give_the_error_names_the_way_out(script):
    done = serve(script, SCARCE | NOTHING)
    assert done.returncode != 0
    assert "no memory is left for the KV cache" in done.stderr
    assert "close other programs: they hold" in done.stderr
