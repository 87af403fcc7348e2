"""A user's own modules around models of transformers, with masks: token ids -> logits."""

from __future__ import annotations

import transformers
from torch import Tensor, nn

from support.forwards import DIM, VOCAB


class EncoderDecoder(nn.Module):
    """Every token but the padding is attended."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 1).long()
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            decoder_input_ids=ids,
            decoder_attention_mask=mask,
            use_cache=False,
        ).logits


class Decoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=DIM, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    return EncoderDecoder(transformers.T5ForConditionalGeneration(config))


def bart() -> nn.Module:
    sizes = {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in _BART.items()}
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=DIM, max_position_embeddings=64, dropout=0.0, **sizes
    )
    return EncoderDecoder(transformers.BartForConditionalGeneration(config))


_BART = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        pad_token_id=None,
    )
    return Decoder(transformers.MixtralForCausalLM(config))
