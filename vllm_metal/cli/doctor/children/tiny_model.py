# SPDX-License-Identifier: Apache-2.0
"""Makes a llama with random weights and a vocabulary of letters and numbers.

python -m vllm_metal.cli.doctor.children.tiny_model FOLDER
"""

import sys

from vllm_metal.device.child import send_message

_WORDS = ("<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", *map(str, range(35)))


def main() -> None:
    send_message(stage="making a tiny model")
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    # The smallest model that every attention kernel supports: heads of 64, two per K/V head.
    config = LlamaConfig(
        vocab_size=len(_WORDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=128**-0.5,
        bos_token_id=_WORDS.index("<s>"),
        eos_token_id=_WORDS.index("</s>"),
    )
    model = LlamaForCausalLM(config)
    # Spreads logits as far as a trained model's, so that rounding does not change the choice.
    model.lm_head.weight.data *= 5
    model.save_pretrained(sys.argv[1])
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=config.max_position_embeddings,
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )
    tokenizer.save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
