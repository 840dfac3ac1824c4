# SPDX-License-Identifier: Apache-2.0
"""Errors of `vllm serve` for mistakes in its arguments and its model's folder."""

import json
import sys

import pytest
from huggingface_hub import constants
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli import serve
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_metal.cli.fit.source import write_stub
from vllm_metal.cli.main import main
from vllm_metal.patches.vllm_patches import start_failures
from vllm_metal.patches.vllm_patches.start_failures import ERROR_PREFIX, cause

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
}
NAME = "model.safetensors"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model in the working folder with sparse weights, and parts of adapters."""
    monkeypatch.chdir(tmp_path)
    for name, config in (("empty", "{}"), ("half", '{"r": 8')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(config)
    (tmp_path / "half" / "adapters.safetensors").touch()
    made = tmp_path / "model"
    made.mkdir()
    write(made)
    return made


def write(folder, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    layer = "model.layers.0."
    square = [f"self_attn.{name}_proj" for name in "qkvo"]
    square += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    shapes = {f"{layer}{name}.weight": (96, 96) for name in square}
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    shapes |= {f"{name}.weight": (96,) for name in norms}
    shapes["model.embed_tokens.weight"] = (64, 96)
    nbytes = {96: 384, 64: 24576}
    write_stub(
        folder / NAME,
        {
            name: ("F32", shape, nbytes.get(shape[0], 0) if len(shape) == 1 else 4 * shape[0] * 96)
            for name, shape in shapes.items()
        },
    )


@pytest.fixture(scope="module")
def parser():
    made = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    before, refuse = sys.excepthook, FlexibleArgumentParser.error
    current_platform.pre_register_and_update(made)
    yield made
    sys.excepthook, FlexibleArgumentParser.error = before, refuse


@pytest.fixture
def answer(parser, monkeypatch, capsys):
    """Returns the final message of `vllm serve`, using vLLM's own steps up to its engine."""

    def of(*argv):
        monkeypatch.setattr(sys, "argv", ["vllm", "serve", *argv])
        try:
            args = parser.parse_args(list(argv))
            args.subparser = "serve"
            serve.validate_parsed_serve_args(args)
            args.model = args.model_tag or args.model
            EngineArgs.from_cli_args(args).create_engine_config()
        except SystemExit as end:
            assert end.code == 1
            return capsys.readouterr().err.removeprefix(ERROR_PREFIX).rstrip("\n")
        except Exception as error:
            return cause(error)
        return ""

    return of


ARGUMENTS = [
    ("--max-model-len abc", "--max-model-len=abc is not a whole number, such as 8192 or 8k"),
    ("--max-model-len -5", "--max-model-len=-5: it must be greater than or equal to -1"),
    ("--max-model-len 0", "--max-model-len must be a positive integer, got int: 0"),
    (
        "--max-model-len 4096",
        "--max-model-len=4096 is longer than the model's maximum of 1024 tokens",
    ),
    ("--gpu-memory-utilization 9", "--gpu-memory-utilization=9.0: it must be less than or equal"),
    ("--gpu-memory-utilization 90%", "--gpu-memory-utilization=90% is not a number, such as 0.9"),
    ("--port 99999", "--port=99999 is not a port: choose one from 1 to 65535"),
    ("--port http", "--port=http is not a whole number"),
    ("--dtype float8", "--dtype=float8 is not supported: choose one of auto, bfloat16, float,"),
    ("--tensor-parallel-size 2", "--tensor-parallel-size=2 does not divide the model's 3 heads"),
    ("--pipeline-parallel-size 2", "-size 2 (more ranks than the model has layers, 1)"),
    ("--kv-cache-dtype int3", "--kv-cache-dtype=int3 is not supported: choose one of auto, fp8,"),
    ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype fp8_e5m2 (choose one of auto, fp8, int8, or"),
    ("--quantization bitsandbytes", "--quantization=bitsandbytes is not supported: weights are"),
    ("--quantization awq", "--quantization=awq is not supported: weights are served as"),
    ("--kv-cache-memory-bytes lots", "=lots is not a whole number, such as 8192 or 8k"),
    ("--kv-cache-memory-bytes 90000G", "is more than the memory of this machine, "),
    ("--max-num-seqs 0", "--max-num-seqs=0: it must be greater than or equal to 1"),
    ("--block-size 48", "--block-size 48 is not supported: choose one of (16, 32)"),
    ("--tokenizer ./missing", "--tokenizer: there is no folder ./missing"),
    ("--chat-template ./a.jinja", "--chat-template=./a.jinja: there is no such file"),
    ("--chat-template {{a}", "--chat-template={{a} is not a template: line 1: unexpected '}'"),
    ("--served-model-name ''", "--served-model-name is empty: leave it out, or give a name"),
    ("--enable-lora --lora-modules a=./b", "--lora-modules a=./b: there is no such folder"),
    ("--enable-lora --lora-modules a=.", "a=.: the folder has no adapter_config.json, so it"),
    ("--enable-lora --lora-modules a=empty", "a=empty: the folder has none of adapter_model.s"),
    ("--enable-lora --lora-modules a=half", "a=half: adapter_config.json is not JSON, so make"),
    ("--lora-modules path", "--lora-modules=path is neither NAME=PATH nor JSON"),
    ("--speculative-config ngram", 'ngram is not JSON, such as \'{"method": "ngram", "num'),
    ('--speculative-config {"method":"x"}', "method 'x' is not supported: choose one of ngram,"),
    ('--speculative-config {"model":"./x"}', "--speculative-config: model: there is no folder"),
    ('--speculative-config {"methd":"x"}', "has no key 'methd'; did you mean method?"),
    ('--speculative-config {"method":"ngram"}', "num_speculative_tokens is missing, such as 3"),
    ('--additional-config {"max_step":1}', "has no key 'max_step' (known: "),
    ("--additional-config a=b", "--additional-config=a=b is not JSON, such as"),
    ('--speculative-config {"method":"eagle3"}', "model is missing: name the checkpoint that"),
    (
        '--speculative-config {"method":"ngram","num_speculative_tokens":-2}',
        "--speculative-config: num_speculative_tokens=-2: it must be greater than 0",
    ),
    ("--api-key ''", "--api-key is empty, which lets anybody in: leave it out, or give a key"),
    (
        '--hf-overrides {"hidden_size":"big"}',
        "hidden_size of config.json, or of --hf-overrides: expected int, got str (value: 'big')",
    ),
    ("--hf-overrides rope", "--hf-overrides=rope is not JSON, such as"),
    ('--limit-mm-per-prompt {"image":"x"}', "--limit-mm-per-prompt='x': it must be a valid int"),
    ("--config ./a.yaml", "there is no file ./a.yaml"),
    ("--config a.txt", "--config takes a file whose name ends in .yaml or .yml"),
    ("--max-modelen 5", "unknown: --max-modelen 5; did you mean --max-model-len?"),
    (
        "--tool-call-parser nosuch",
        "=nosuch is not supported: omit the option to use the model's default",
    ),
    (
        "--reasoning-parser nosuch",
        "=nosuch is not supported: omit the option to use the model's default",
    ),
    ("--ssl-keyfile a.key", "--ssl-keyfile=a.key: there is no such file"),
    ("--middleware no.such.Thing", "--middleware=no.such.Thing does not exist: give MODULE.NAME"),
    ("--logits-processors no.such:Thing", "--logits-processors=no.such:Thing does not exist: give"),
    ("--max-num-batched-tokens 0", "--max-num-batched-tokens=0: it must be greater than or equ"),
    ("--kv-cache-memory-bytes -5", "--kv-cache-memory-bytes=-5: it must be greater than or equ"),
    ("--generation-config missing", "--generation-config: missing is not on this machine, and HF"),
    ("--generation-config .", "--generation-config=.: the folder has no generation_config.json"),
    ('--override-generation-config {"top_k":"x"}', "config: top_k 'x' is not a number: change it"),
    ('--override-generation-config {"top_p":7}', "--override-generation-config: top_p must be in"),
    ("--allowed-local-media-path nope", "--allowed-local-media-path=nope: there is no such folder"),
    ("--ssl-certfile model/config.json", "config.json is not a certificate with its key"),
    ("--distributed-executor-backend no", "backend=no is not supported: leave it out"),
    ("--tokenizer-mode nonsense", "--tokenizer-mode=nonsense is not supported: leave it out"),
    ("--attention-backend NOPE", "--attention-backend=NOPE is not supported: leave it out"),
    ("--kv-transfer-config nope", "--kv-transfer-config=nope is not JSON, such as '{\"key\": 1}'"),
    ('--kv-transfer-config {"kv_role":3}', "--kv-transfer-config: kv_role=3: it must be 'kv_pro"),
    ('--kv-events-config {"a":1}', "--kv-events-config: there is no key 'a'"),
    ("--compilation-config 9", "--compilation-config=9 is not JSON, such as"),
    ('--structured-outputs-config {"backend":"x"}', "config: backend='x': it must be 'auto', "),
    ('--hf-overrides {"rope_parameters":{"factor":2}}', "have no rope_type: add one, such as"),
    ("--allowed-origins x", "--allowed-origins=x is not JSON, such as '[\"a\"]'"),
    ("--default-chat-template-kwargs x", "=x is not JSON, such as '{\"key\": 1}'"),
    ("--trust-remote-code=maybe", "--trust-remote-code takes no value: leave out maybe"),
    ("--device cuda", "--device is not an option: did you mean --device-ids or"),
    ("--seed -1", "--seed=-1: it must be greater than or equal to 0"),
    ("--seed 99999999999", "--seed=99999999999: it must be less than or equal to 4294967295"),
    ("--seed x", "--seed=x is not a whole number"),
    ("--enable-lora --lora-modules a=b/c", "--lora-modules a: b/c is not on this machine, and HF"),
    ("--tool-parser-plugin nope.py", "--tool-parser-plugin=nope.py: there is no such file"),
    (
        "--ssl-certfile model/config.json --ssl-keyfile model/config.json",
        "is not a certificate with its key: give both in PEM format",
    ),
]


def words(line):
    return ["" if word == "''" else word for word in line.split(" ")]


@pytest.mark.parametrize(("given", "told"), ARGUMENTS, ids=[given for given, _ in ARGUMENTS])
def test_a_wrong_argument_is_answered_in_one_line(folder, answer, monkeypatch, given, told):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = answer("model", *words(given))
    assert told in said and "\n" not in said


@pytest.mark.parametrize(
    ("changes", "given", "told"),
    [
        ({}, {"speculative_config": "ngram"}, "--speculative-config=ngram is not JSON, such as"),
        ({}, {"max_lora_rank": 7, "enable_lora": True}, "max_lora_rank=7: it must be 1, 8, 16"),
        ({"hidden_size": 100}, {}, "is not a multiple of the number of"),
    ],
)
def test_arguments_of_a_script_are_answered_by_one_error(folder, parser, changes, given, told):
    write(folder, **changes)
    start_failures.name_causes()
    with pytest.raises(start_failures.StartError) as caught:
        EngineArgs(model="model", **given).create_engine_config()
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_model_and_arguments_that_are_right_are_taken(folder, answer):
    draft = '{"method": "ngram", "num_speculative_tokens": 2}'
    assert answer("model", "--speculative-config", draft, "--kv-cache-dtype", "int8") == ""


def with_config(text):
    return lambda folder: (folder / "config.json").write_text(text)


def with_file(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def without(name):
    return lambda folder: (folder / name).unlink()


def renamed(name, other):
    return lambda folder: (folder / name).rename(folder / other)


def linked_to_itself(name):
    def change(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(name)

    return change


def as_a_folder(name):
    def change(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def saying(**changes):
    return lambda folder: write(folder, **changes)


def of_method(method, **more):
    return saying(quantization_config={"quant_method": method, **more})


LFS = b"version https://git-lfs.github.com/spec/v1\n"
#: Folders, what is wrong with them, and whether `fit`, which serves no requests, finds it as well.
FOLDERS = [
    ("cut off", with_file(NAME, b"\x08\0\0\0\0\0\0\0{}"), "is cut off: it has 10 bytes of", True),
    ("a page", with_file(NAME, b"<!DOCTYPE html>"), "has no weights: it begins with '<!DO", True),
    ("of LFS", with_file(NAME, LFS), "it is a pointer of Git LFS: fetch the file itself", True),
    ("no weights", without(NAME), "is missing: the folder has no weights", True),
    ("pickled", renamed(NAME, "pytorch_model.bin"), "is not supported: choose a checkpoint", True),
    ("no config", without("config.json"), "has no config.json: it is not a model's", True),
    ("empty config", with_config(""), "config.json is not JSON, so download it again: it", True),
    ("a list", with_config("[]"), "config.json holds no JSON object", True),
    ("nothing", with_config("null"), "config.json holds no JSON object", True),
    ("bytes", with_file("config.json", b"\xff\xfe"), "config.json is not JSON", True),
    ("no type", with_config("{}"), "config.json names no model_type", True),
    ("text", saying(num_hidden_layers="two"), "layers='two', which is not a number", True),
    ("no tokenizer", without("tokenizer.json"), "has no tokenizer: add its tokenizer.json", True),
    ("half", with_file("tokenizer.json", b'{"a": '), "tokenizer.json is not JSON, so down", True),
    ("index", with_file(f"{NAME}.index.json", b"{"), "index.json is unreadable", True),
    ("shard", with_file(f"{NAME}.index.json", b'{"weight_map": {"a": "b"}}'), "b is missing", True),
    ("noise", with_file(NAME, b"\xff" * 5000), "safetensors is not a safetensors file; down", True),
    ("no bytes", with_file(NAME, b""), "is cut off: it has 0 bytes of 8", True),
    ("loop", linked_to_itself(NAME), "it is a broken link; download it again", True),
    ("loop of config", linked_to_itself("config.json"), "has no config.json: it is not a", True),
    ("folder of config", as_a_folder("config.json"), "has no config.json: it is not a", True),
    ("folder of tokens", as_a_folder("tokenizer.json"), "json cannot be read (Is a dir", True),
    ("no tokens", with_file("tokenizer.json", b"{}"), "tokenizer.json has no 'model', so d", True),
    ("defaults", with_file("generation_config.json", b'{"top_k": "x"}'), "top_k 'x' is no", False),
    ("template", with_file("chat_template.jinja", b"{{ a }"), "not a template: line 1: une", False),
    ("rope", saying(rope_parameters={"rope_type": "yarn"}), "{'factor'}", False),
    ("no layers", saying(num_hidden_layers=0), "num_hidden_layers=0, which must be at", True),
    ("unknown type", saying(model_type="foo"), "model_type='foo' of config.json is not sup", True),
    ("vision", saying(model_type="vit", architectures=["ViTModel"]), "['ViTModel'] of con", True),
    ("bitsandbytes", of_method("bitsandbytes"), "quant_method='bitsandbytes' is not supp", True),
    ("AWQ of 3 bits", of_method("awq", bits=3), "quantization_config with bits=3 is not", True),
    ("FP8 of e5m2", of_method("fp8", fmt="e5m2"), 'quantization_config with fmt="e5m2" is', True),
    ("GPTQ", of_method("gptq", bits=4, checkpoint_format="x"), "checkpoint_format=", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "told", "of_fit"), [row[1:] for row in FOLDERS], ids=[row[0] for row in FOLDERS]
)
def test_a_folder_that_is_not_served_is_refused_alike_by_serve_and_fit(
    folder, answer, capsys, damage, told, of_fit
):
    damage(folder)
    said = answer("model")
    assert told in said and "\n" not in said
    if of_fit:
        assert main(["fit", "model", "--memory", "16GB"]) == 1
        assert capsys.readouterr().err == f"vllm-metal: error: {said}\n"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
        {"frobnicated_by": "nobody"},
    ],
    ids=["plain", "FP8 over plain weights", "AWQ over plain weights", "a key of nobody's"],
)
def test_a_folder_that_is_served_is_taken_by_serve_and_fit(folder, answer, changes):
    write(folder, **changes)
    assert answer("model") == ""
    assert main(["fit", "model", "--memory", "16GB"]) == 0
