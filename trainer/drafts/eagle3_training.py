"""The objective of an EAGLE-3 draft: the draft learns the target's distribution of the next tokens, from its own
states.

Slot p of a text pairs the embedding of token p + 1 with the target's states at token p, and predicts token p + 2. In
decoding the draft continues from its own states, so training unrolls it in the same way (2503.01840, section 3.2). An
anchor is an arbitrary token of the text, and a chain starts from the slot before its anchor. Step k (from 0) of a chain
predicts token anchor + 1 + k. From step 1 on, a step pairs the embedding of token anchor + k with the state of the
chain's previous step. Step 0 runs all slots of the text at once. A chain's later slots attend to the text's slots
before the anchor and to the slots of their own chain. Chains do not see each other, so one pass over many chains equals
one pass over each chain. Anchors are drawn in the same way as for the blocks of a DSpark draft, at most ``anchors`` in
a text. So the mask stays small: it has the columns of the text and at most (steps - 1) x anchors further columns.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.errors import UserError
from decoding.files.stored import CONFIG_NAME
from decoding.model.causal_lm import CausalLM
from decoding.model.eagle3_config import Eagle3Config, default_layers, usual_layers
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.forward import unscaled_embeddings
from decoding.model.loading import load_eagle3
from trainer.data.batch import Batch, Example, flat_rows
from trainer.drafts.distill import drafter_of
from trainer.drafts.dspark_start import SCALED, check_taps, layer_sizes, rotary_of
from trainer.drafts.dspark_training import Blocks, BlocksPrefetch, Labels, labels_of, sample_blocks
from trainer.learning.fused import fused_loss
from trainer.learning.losses import HiddenTeacher, LossMix
from trainer.learning.objective import EVERYWHERE_THE_SAME, GreedyTexts, TermSums
from trainer.recipe.draft import DraftSection, Eagle3Section
from trainer.target.initial import most_frequent_trained
from trainer.target.loading import OnlineTarget

# --- before training --------------------------------------------------------------------------------------------------


def initial_eagle3(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, section: DraftSection, examples: Sequence[Example]
) -> Eagle3Draft:
    """Make a recipe's initial draft, in fp32 on the target's device. The draft is either a stored draft or a new one,
    whose random weights come from torch's global seed.

    The lm_head of a random draft consists of rows of the target's lm_head. Raises UserError for a draft that does not
    fit the target.
    """
    assert section.eagle3 is not None, "the recipe asks for an EAGLE-3 draft"
    if section.init.from_model is not None:
        return _stored_draft(target, section.init.from_model, section)
    config, chosen = eagle3_config(target, section.eagle3), None
    if section.vocabulary is not None and section.vocabulary < target.vocab_size:
        chosen = most_frequent_trained(section.vocabulary, target.vocab_size, target, tokenizer, examples)
        config = replace(config, draft_vocab_size=len(chosen))
    draft = Eagle3Draft(config.for_target(target)).to(target.device)
    rows: Tensor = target.model.get_output_embeddings().weight.detach()
    if chosen is not None:
        draft.write_only(chosen)
        rows = rows[draft.output_tokens.to(rows.device)]
    with torch.no_grad():
        draft.lm_head.weight.copy_(rows[: config.vocab_size])
    return draft


def eagle3_config(target: CausalLM, section: Eagle3Section) -> Eagle3Config:
    """Return the config of a recipe's draft. The config sets no flag; vLLM, SGLang and llama.cpp all read this form."""
    try:
        taps = section.taps or default_layers(target.num_layers)
    except UserError as error:
        raise UserError(
            f"the target has {target.num_layers} layers, which are too few for the default taps: set draft.eagle3.taps"
        ) from error
    check_taps("draft.eagle3.taps", taps, target)
    sizes, rope = layer_sizes(target), rotary_of(target)
    scaled = rope.get("rope_type") in (*SCALED, "llama3")
    scaling = {key: value for key, value in rope.items() if key != "partial_rotary_factor"} if scaled else {}
    theta = rope.get("rope_theta") or 10_000.0
    return Eagle3Config(
        **sizes | {"intermediate_size": section.intermediate_size or sizes["intermediate_size"]},
        draft_vocab_size=target.vocab_size,
        target_layer_ids=taps,
        rope_parameters={"rope_type": "default", "rope_theta": theta, **scaling},
    )


def _stored_draft(target: CausalLM, name: str, of_draft: DraftSection) -> Eagle3Draft:
    """Load a draft to train further; raise UserError if its sizes differ from the sizes in the section. A size of None
    in the section matches any size.
    """
    section = of_draft.eagle3
    assert section is not None, "the recipe asks for an EAGLE-3 draft"
    draft = load_eagle3(name, target).float().requires_grad_(True).train()
    config = draft.config
    for key, wanted, held in (
        ("eagle3.taps", section.taps, config.target_layer_ids),
        ("eagle3.intermediate_size", section.intermediate_size, config.intermediate_size),
        ("vocabulary", min(of_draft.vocabulary or config.draft_vocab_size, target.vocab_size), config.draft_vocab_size),
    ):
        if wanted not in (None, held):
            raise UserError(
                f"draft.init.from_model, {name}, has {key} {held} and not {wanted}: change draft.{key}, or use "
                "another draft"
            )
    return draft


# --- the unrolled pass ------------------------------------------------------------------------------------------------


class Eagle3Inputs(NamedTuple):
    """Inputs of a step: the inputs of the draft's pass, and the labels with the target's distribution."""

    states: Float[Tensor, "batch positions taps"]
    embedded: Float[Tensor, "batch positions hidden"]
    batch: Batch
    blocks: Blocks
    labels: Labels
    teacher: HiddenTeacher


def run_chains(
    draft: Eagle3Draft,
    states: Float[Tensor, "batch positions taps"],
    embedded: Float[Tensor, "batch positions hidden"],
    batch: Batch,
    anchors: Int[Tensor, "batch chains"],
    steps: int,
) -> Float[Tensor, "batch chains*steps hidden"]:
    """Run the slots of the texts, then ``steps`` - 1 further slots of every chain; return the chains' states."""
    kept: list[tuple[Tensor, Tensor]] = []

    def held(step: int, *fresh: Tensor) -> tuple[Tensor, Tensor]:
        kept[step:] = kept[step:] or [(fresh[0], fresh[1])]  # a checkpointed layer runs again when later keys are known
        keys, values = (torch.cat(parts, 2) for parts in zip(*kept[:step], fresh, strict=True))
        return keys, values

    documents, positions = batch.documents[:, :-1], batch.positions()[:, :-1]
    index, slots = torch.arange(documents.shape[1], device=anchors.device), (anchors - 1).clamp(min=0)
    window, apart = draft.config.sliding_window or 1 << 30, None
    if batch.packed or window < len(index):
        before = index[:, None] - index
        apart = ((documents[:, None] == documents[..., None]) & (before >= 0) & (before < window))[:, None]
    state = _at(draft(embedded[:, 1:], draft.fused(states[:, :-1]), positions, partial(held, 0), apart), slots)
    sees_text = (index <= slots[..., None]) & (documents[:, None] == documents.gather(1, slots)[..., None])
    chain = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device).expand(len(anchors), -1, -1)
    first, chain_states = positions.gather(1, slots), [state]
    for step in range(1, steps):
        tokens = _at(embedded, (anchors + step).clamp(max=embedded.shape[1] - 1))
        near = sees_text & ((slots + step)[..., None] - index < window)
        mask = torch.cat((near, *(chain & (step - key < window) for key in range(1, step + 1))), 2)[:, None]
        state = draft(tokens, draft.recycled(state), first + step, partial(held, step), mask)
        chain_states.append(state)
    return torch.stack(chain_states, 2).flatten(1, 2)


def _at(values: Float[Tensor, "batch positions hidden"], index: Int[Tensor, "batch chains"]) -> Tensor:
    """Return ``values`` at some positions of each row."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


class Eagle3Training(nn.Module):
    """The module that is trained: the draft, and its loss with a term for each unrolled step."""

    def __init__(self, draft: Eagle3Draft, mix: LossMix, steps: int) -> None:
        super().__init__()
        self.draft, self._mix, self._steps = draft.train(), mix, steps

    def forward(self, inputs: Eagle3Inputs, scale: Float[Tensor, " terms"] | None = None) -> TermSums:
        """Return the losses and the hits, each of shape (terms,), and the total. Hits are defined as in
        `DSparkTraining`.
        """
        states = run_chains(
            self.draft, inputs.states, inputs.embedded, inputs.batch, inputs.blocks.anchors, self._steps
        )
        hidden = self.draft.norm(flat_rows(states, inputs.labels.slots))
        sums: TermSums = self.draft.lm_head(hidden, partial(self._compared, inputs, scale))
        return sums

    def _compared(
        self, inputs: Eagle3Inputs, scale: Tensor | None, hidden: Float[Tensor, "rows hidden"], lm_head: Tensor
    ) -> TermSums:
        labels, config = inputs.labels, self.draft.config
        loss = fused_loss(
            hidden,
            lm_head,
            inputs.batch.tokens.flatten()[labels.text + 1],
            self._mix,
            inputs.teacher,
            groups=labels.groups,
            row_weights=None if scale is None else scale[labels.depths],
            tokens=None if config.draft_vocab_size == config.vocab_size else self.draft.output_tokens,
        )
        return TermSums.of_rows(loss, labels.depths, self._steps, self._mix.soft)


class Eagle3Objective:
    """An EAGLE-3 draft, its target, and the loss between them."""

    def __init__(
        self, target: CausalLM, draft: Eagle3Draft, section: DraftSection, seed: int, states: OnlineTarget | None = None
    ) -> None:
        """The anchors are drawn with ``seed``.

        If ``states`` is None, ``target`` runs at every step. The finished draft has the target's dtype.
        """
        assert section.eagle3 is not None, "the recipe asks for an EAGLE-3 draft"
        self._target, self._seed, self._states = target, seed, states or OnlineTarget(target)
        self._section, self._length = section.eagle3, section.num_draft_tokens
        mix = LossMix.of(section.loss)
        self.module: Eagle3Training = Eagle3Training(draft, mix, section.eagle3.steps)
        self.hit_name = "acceptance" if mix.soft else "top1"
        self.terms = tuple(f"token_{step}" for step in range(1, section.eagle3.steps + 1))

    def weights(self, step: int) -> tuple[float, ...]:
        falling = [self._section.decay**depth for depth in range(self._section.steps)]
        return tuple(weight / sum(falling) for weight in falling)

    def rates(self, step: int) -> Mapping[str, float]:
        return EVERYWHERE_THE_SAME

    def counts(self, batch: Batch, step: int = 0) -> Float[Tensor, " terms"]:
        return torch.tensor(list(map(len, self._blocks(batch, step).labelled)), dtype=torch.float32)

    def prefetch(self, batch: Batch, step: int) -> BlocksPrefetch:
        blocks = self._blocks(batch, step)
        return BlocksPrefetch(blocks, labels_of(batch, blocks, self._section.steps), self._states.read(batch))

    def _blocks(self, batch: Batch, step: int) -> Blocks:
        """Draw the anchors; the first two tokens of a text are never labels, because no slot predicts them."""
        predicted = replace(batch, trained=batch.trained & (batch.positions() > 1))
        return sample_blocks(predicted, self._section.anchors, self._section.steps, self._seed, step)

    def inputs(self, batch: Batch, step: int, prefetched: BlocksPrefetch | None = None) -> tuple[Any, ...]:
        self.module.train()  # decoding leaves the module in evaluation mode
        blocks, labels, stored = prefetched or self.prefetch(batch, step)
        hidden, states = self._states.tapped(batch, self.module.draft.config.target_layer_ids, stored)
        lm_head = self._states.lm_head.to(batch.tokens.device)  # the target may keep its lm_head on another device
        teacher = HiddenTeacher(flat_rows(hidden, labels.text), lm_head, self._states.transform)
        embedded = unscaled_embeddings(self._target.model, batch.tokens)
        return (Eagle3Inputs(states, embedded, batch, blocks, labels, teacher),)

    def decoding_copy(self) -> Eagle3Draft:
        """Return a copy of the draft with its current weights, in the target's dtype."""
        return copy.deepcopy(self.module.draft).to(self._target.device, self._target.dtype).requires_grad_(False).eval()

    def drafter(self) -> Drafter:
        return drafter_of(self.decoding_copy(), self._length)

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Do nothing: an EAGLE-3 draft stores no tree."""

    def save(self, folder: Path) -> None:
        draft, path = self.decoding_copy(), folder / CONFIG_NAME
        draft.save_pretrained(folder)
        if draft.config.target_layer_ids != usual_layers(self._target.num_layers):
            # Without this, the config would omit the layers if they are the default layers of a target with another
            # depth.
            content = json.loads(path.read_text()) | draft.config.named_layers()
            path.write_text(json.dumps(content, indent=2) + "\n")
