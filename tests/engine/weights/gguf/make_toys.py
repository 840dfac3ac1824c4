# SPDX-License-Identifier: Apache-2.0
"""Makes the toys of test_served.py: `python make_toys.py LLAMA_CPP [NAME...]`.

Each toy is a small transformers model with random weights that bfloat16 holds exactly, converted by
llama.cpp, with the logits that transformers computes. Only the GGUF files and the
logits are kept. Needs a checkout of https://github.com/ggml-org/llama.cpp.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import toy_hybrids
import toy_models
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_models import BASE, Toy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

TOYS: dict[str, Toy] = toy_models.TOYS | toy_hybrids.TOYS
OUT = Path(__file__).parent / "toys"
PROMPT = [1, 2, 33, 44, 255, 66, 77, 8, 99, 100, 200, 17]


def make_model(name: str) -> torch.nn.Module:
    """Makes a model with weights that bfloat16 holds, and clearly different logits."""
    torch.manual_seed(0)
    kind, changes, *_ = TOYS[name]
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(BASE | changes)))
    model = model.float().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                noise = parameter + noise * 0.2
            elif not ("embed" in path or "lm_head" in path):
                noise = noise * 0.2
            parameter.copy_(noise.bfloat16().float())
    return model


def publish(name: str, folder: Path) -> None:
    """Rewrites config.json as on the hub, where transformers writes it differently."""
    _, _, *changes = TOYS[name]
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for each in changes:
        config = {key: value for key, value in (config | each).items() if value is not None}
    path.write_text(json.dumps(config))


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of bytes and nine more tokens; the family's class may add its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"<{i}>" for i in range(8)), "he"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<0>", eos_token="<1>", pad_token="<1>"
    ).save_pretrained(folder)


def convert(folder: Path, out: Path) -> None:
    """Writes a GGUF file as convert_hf_to_gguf.py does; the vocabulary is the same for all."""
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase, ModelType, TextModel, get_model_architecture

    with torch.inference_mode():
        # Published settings unchanged; transformers' class would add missing ones.
        ModelBase.load_hparams = staticmethod(
            lambda folder, *_, **__: json.loads((folder / "config.json").read_text())
        )
        settings = ModelBase.load_hparams(folder, False)
        made = get_model_class(get_model_architecture(settings, ModelType.TEXT))
        for converter in (made, getattr(made, "Ministral3Model", made)):
            converter.no_mtp = True
            converter.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
            converter.set_vocab = lambda self: TextModel._set_vocab_gpt2(self)
        made(folder, gguf.LlamaFileType.MOSTLY_BF16, out).write()


def main() -> None:
    llama_cpp = Path(sys.argv[1])
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[2:] or TOYS:
        with TemporaryDirectory() as scratch:
            model = make_model(name)
            model.save_pretrained(scratch)
            publish(name, Path(scratch))
            write_tokenizer(Path(scratch))
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT])).logits[0].numpy()
            convert(Path(scratch), OUT / f"{name}.gguf")
            np.save(OUT / f"{name}.npy", logits)
            print(name, logits.std())


if __name__ == "__main__":
    main()
