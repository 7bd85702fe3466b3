"""Medusa heads for a model class of your own, which transformers does not have.

    python examples/own_model.py

The model here runs one block several times, each time with separate keys and values. Such a class needs position ids, a
key-value cache, attention through transformers' interface (to support a tree's mask), and an lm_head. Once the class is
registered with transformers' auto classes, its models can be targets in training and in decoding, as other models can.
"""

import argparse
import json
import random
import sysconfig
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from decoding import HeadstartModel, speculate
from decoding.model.loading import load_tokenizer
from trainer import load_recipe, run_recipe

# --- the class --------------------------------------------------------------------------------------------------------


class LoopedConfig(PreTrainedConfig):
    model_type = "looped"

    def __init__(self, vocab_size=2048, hidden_size=128, num_attention_heads=4, num_hidden_layers=4, **others):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_attention_heads, self.num_hidden_layers = num_attention_heads, num_hidden_layers
        self.max_position_embeddings = others.pop("max_position_embeddings", 512)
        super().__init__(**others)


class Block(nn.Module):
    is_causal = True

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.config, size = config, config.hidden_size
        self.head_dim = size // config.num_attention_heads
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: Tensor, mask: Tensor | None, cache: DynamicCache | None, turn: int) -> Tensor:
        batch, length, size = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, turn)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mixed, _ = attend(self, q, k, v, mask, scaling=self.head_dim**-0.5)
        x = x + self.out(mixed.reshape(batch, length, size))
        return x + self.mlp(self.norms[1](x))


class LoopedModel(PreTrainedModel, GenerationMixin):
    config_class = LoopedConfig
    _supports_sdpa = _supports_attention_backend = True  # attention comes from transformers' interface

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.block, self.norm = Block(config), nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **others: object,
    ) -> CausalLMOutputWithPast:
        x = self.tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,  # a tree's mask, with a row per token, is returned unchanged
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        x = x + self.positions(position_ids)
        for turn in range(self.config.num_hidden_layers):
            x = self.block(x, mask, past_key_values, turn)
        logits = self.lm_head(self.norm(x[:, -logits_to_keep:]))
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


# From here on all loaders of transformers, and thus of this project, can load this model. Another program must also
# import and register the classes before it loads the model.
AutoConfig.register("looped", LoopedConfig)
AutoModelForCausalLM.register(LoopedConfig, LoopedModel)

# --- a model of this class --------------------------------------------------------------------------------------------

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=150, help="training steps of the model")
parser.add_argument("--output", type=Path, default=Path("runs/examples/own-model"))
parser.add_argument("changes", nargs="*", help="changes of the heads' recipe, such as training.steps=100")
options = parser.parse_args()

folder = options.output / "target"
train, heldout = (options.output / f"{name}.jsonl" for name in ("train", "heldout"))
if not (folder / "config.json").is_file():
    options.output.mkdir(parents=True, exist_ok=True)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))  # texts that every machine has
    texts = [file.read_text(encoding="utf-8") for file in files]
    for path, rows in ((train, texts[8:]), (heldout, texts[:8])):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts[8:], vocab_size=2048, special_tokens=["<|end|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<|end|>", eos_token="<|end|>")
    torch.manual_seed(0)
    model = LoopedModel(LoopedConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id))
    tokens = torch.tensor([token for text in texts[8:] for token in tokenizer(text)["input_ids"]])
    matrices = [weight for weight in model.block.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not each for each in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.0), torch.optim.AdamW(others, lr=1e-2)]
    draw = random.Random(0)
    for step in range(1, options.steps + 1):
        begins = [draw.randrange(len(tokens) - 129) for _ in range(16)]
        batch = torch.stack([tokens[begin : begin + 129] for begin in begins])
        loss = F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 25 == 0:
            print(f"the model: step {step} of {options.steps}, loss {loss:.2f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

# --- heads for the model, as for any target ---------------------------------------------------------------------------

settings = {
    "name": "heads of my own model",
    "target": folder,
    "output": options.output / "heads",
    "data.train": train,
    "data.heldout": heldout,
    "data.max_length": 128,
    "data.max_rows": 200,
    "training.steps": 60,
    "training.batch_size": 16,
    "training.micro_batch_size": 16,
    "training.learning_rate": 4e-3,
}
settings |= dict(change.split("=", 1) for change in options.changes)
medusa = Path(__file__).parent.parent / "recipes" / "any" / "medusa1.yaml"
recipe = load_recipe(medusa, [f"{key}={value}" for key, value in settings.items()])
heads = run_recipe(recipe)
decoder = HeadstartModel.from_pretrained(str(folder), f"heads:{heads}", dtype=torch.float32)
tokenizer = load_tokenizer(str(folder))
inputs = tokenizer("import os\nimport sys\n\n", return_tensors="pt").to(decoder.device)
ours = decoder.generate(**inputs, max_new_tokens=64, do_sample=False)
theirs = decoder.target.model.generate(**inputs, max_new_tokens=64, do_sample=False)
output = speculate(decoder.target, decoder.drafter, inputs["input_ids"], max_new_tokens=64, policy="fixed")
print(tokenizer.decode(ours[0]))
print(f"the text of transformers' generate: {'equal' if torch.equal(ours, theirs) else 'DIFFERENT'}")
print(f"{output.tokens_per_pass:.2f} tokens per target pass")
