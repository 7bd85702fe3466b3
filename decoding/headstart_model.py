"""A target and its drafter behind the interface of transformers' `generate`."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from decoding.controls import Processor, sampling_from_generation_config
from decoding.drafters import Drafter
from decoding.drafters.registry import DrafterLoader, parse_drafter
from decoding.dtypes import default_device, parse_device
from decoding.errors import UserError
from decoding.files.hub import only_cached
from decoding.generate import DecodingConfig, Engine
from decoding.model.architecture import check_static, static_of
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_model
from decoding.policies import Policy, default_policy, named_policy
from decoding.rules.verify import Rule
from decoding.speculation import Prompts, SpeculativeOutput, decode_prompts, named_rule, padding_token
from decoding.text import TextDecoder, check_tensor_of_ids


class HeadstartModel:
    """A target and its drafter (None: plain decoding), behind the interface of transformers' `generate`.

    Policies are kept between calls. Without ``policy``, one policy for each temperature learns how many tokens are
    worth drafting. A call with ``seed`` drafts the same number of tokens in each step, so that its passes and texts can
    be repeated. Several threads may call the same model; their steps alternate.
    """

    def __init__(
        self,
        target: CausalLM | PreTrainedModel,
        drafter: Drafter | None,
        policy: Policy | str | None = None,
        static: str = "auto",
        batch_invariant: bool = False,
    ) -> None:
        """``static`` and ``batch_invariant`` mean the same as in `from_pretrained`. If the target is a `CausalLM`, it
        keeps its own settings.
        """
        if not isinstance(target, CausalLM):
            target = CausalLM(target, static=static_of(static, target), batch_invariant=batch_invariant)
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self._policies: dict[tuple[str, float], Policy] = {}

    @staticmethod
    def from_pretrained(
        target: str | PreTrainedModel,
        drafter: str | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        trust_remote_code: bool = False,
        policy: Policy | str | None = None,
        static: str = "auto",
        batch_invariant: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        local_files_only: bool = False,
        **draft_options: Any,
    ) -> "HeadstartModel":
        """Load a target, and a drafter for it, from folders or the Hub.

        Hub names are ORG/NAME or ORG/NAME@REVISION, and so are Hub names in ``drafter``: ``"heads:ORG/NAME@v1"``.
        ``local_files_only`` reads only the local cache.

        ``drafter`` is written as for ``--drafter``: a registry name with path and options (``"lookup"``,
        ``"heads:runs/heads/final"``, ``"draft-tree:runs/draft/final,depth=5"``), or only the folder or Hub id of heads
        or of a draft. None means plain decoding. ``draft_options`` are further options (``tokens=4``) from
        `decoding.drafters.registry.REGISTRY`. A draft's tokenizer must match ``tokenizer``. If ``tokenizer`` is not set
        and the target is given by name, the draft's tokenizer must match the target's tokenizer.

        ``dtype`` (or ``torch_dtype``) and ``device`` apply to a target given by name; heads and drafts use the dtype
        and device of their target. ``dtype`` may be a name of the command line: fast (the default), bf16, fp16 or fp32;
        fast is bf16 if the device supports it natively, and otherwise fp32. ``"auto"`` keeps the stored dtype. The
        default device is the first GPU if there is one, or all GPUs if the weights do not fit on the first GPU.

        ``static`` says whether target and drafts run in fixed shapes. With ``"graphs"`` they run as CUDA graphs, with
        ``"eager"`` without graphs, and with ``"off"`` in dynamic shapes. ``"auto"`` means graphs on a CUDA device if
        the target allows them, and otherwise off; if a graph cannot be recorded, the model warns and continues in
        dynamic shapes. ``static`` does not change the texts. Graphs and their cache occupy memory as long as the model
        exists.

        With ``batch_invariant``, texts in bf16 and fp16 are the same with and without a drafter, alone and in a batch;
        passes take up to twice as long (see `CausalLM`).
        """
        dtype = draft_options.pop("torch_dtype", dtype)
        if drafter is None and draft_options:
            raise UserError(
                f"{next(iter(draft_options))!r} is an option of a drafter, but drafter is not set: "
                "omit the option, or set a drafter"
            )
        with only_cached(local_files_only):
            spec = None if drafter is None else parse_drafter(drafter, **draft_options)
            target_tokenizer: PreTrainedTokenizerBase | str | None = tokenizer
            if isinstance(target, str):
                target_tokenizer = tokenizer or target
                chosen = None if device is None else parse_device(device)
                check_static(static, chosen or default_device())
                target = load_model(target, dtype, chosen, trust_remote_code)
            model = CausalLM(target, static=static_of(static, target), batch_invariant=batch_invariant)
            loader = DrafterLoader(model, target_tokenizer, trust_remote_code)
            return HeadstartModel(model, None if spec is None else loader.load(spec), policy)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def generation_config(self) -> GenerationConfig:
        """Generation config of the target, with the defaults of `generate`."""
        config: GenerationConfig = self.target.model.generation_config or GenerationConfig()
        return config

    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Processor] | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: TextDecoder | None = None,
        rule: Rule | str | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> Int[Tensor, "batch length"] | SpeculativeOutput:
        """Decode like transformers' `generate`, with its defaults and result; ``options`` override the generation
        config.

        In fp32, greedy texts equal the texts of the target's own `generate`. In narrower dtypes the choice between two
        almost equal logits may differ, because a pass over several tokens rounds differently; ``batch_invariant``
        prevents this. Sampled texts have the target's distribution, unless ``rule`` is lossy. If ``seed`` is not set, a
        seed is drawn from torch's global generator, so under the policy "fixed" ``torch.manual_seed`` makes a text
        repeatable. ``batch_size`` rows (None: all) are decoded at a time. Processors receive each text without its
        padding. With ``return_dict_in_generate`` the result is a `SpeculativeOutput`. Raises UserError for an
        unsupported option.
        """
        inputs = options.pop("inputs", None)
        if input_ids is not None and inputs is not None:
            raise UserError("both inputs and input_ids are set", "use one of them")
        for name in _REFUSED_ARGUMENTS:  # options that are switched off are removed
            value = options.pop(name, None)
            if value is not None and value is not False and not (isinstance(value, list) and not value):
                raise UserError(f"{name} is set, which is not supported", _REMEDY)
        config = _resolve(self.generation_config, generation_config, options)
        prompts = self._prompts(inputs if input_ids is None else input_ids, attention_mask, config)
        if streamer is not None and len(prompts.rows) > 1:
            raise UserError(f"a streamer takes one text, not {len(prompts.rows)}: call generate for each prompt")
        eos = _token_list(config.eos_token_id)
        config.num_return_sequences, config.eos_token_id = None, eos or None
        max_new_tokens = _resolve_lengths(config, prompts.width, self.target.max_positions)
        sampling = sampling_from_generation_config(config, tuple(logits_processor or ()), self.device)
        policy = self.policy or default_policy(seed)
        if isinstance(policy, str):
            policy = self._policies.setdefault((policy, sampling.temperature), named_policy(policy))
        if seed is None:
            seed = 0 if sampling.greedy else int(torch.randint(2**62, ()))
        stops = config.stop_strings
        decoding = DecodingConfig(
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            rule=named_rule(rule) if isinstance(rule, str) else rule,
            eos_token_ids=tuple(eos),
            stop_strings=(stops,) if isinstance(stops, str) else tuple(stops or ()),
            seed=seed,
        )
        padding = padding_token(config, None, decoding.eos_token_ids)
        engine = Engine(self.target, self.drafter, policy, tokenizer)
        output = decode_prompts(engine, prompts, decoding, batch_size, padding, streamer)
        return output if config.return_dict_in_generate else output.sequences

    def _prompts(self, input_ids: Tensor | None, attention_mask: Tensor | None, config: GenerationConfig) -> Prompts:
        """Return the prompts, each repeated ``num_return_sequences`` times; without input, the prompt is BOS alone."""
        if input_ids is None:
            if config.bos_token_id is None:
                raise UserError("there are neither input_ids nor a bos_token_id to start from", "use one of them")
            input_ids = torch.tensor([[config.bos_token_id]], device=self.device)
        else:
            check_tensor_of_ids(input_ids)
            padding = config.pad_token_id
            if attention_mask is None and padding is not None and padding not in _token_list(config.eos_token_id):
                attention_mask = input_ids.ne(padding)  # as `generate` does; an EOS may be part of a text
        return Prompts.of_tensor(input_ids, attention_mask).repeated(config.num_return_sequences or 1)


# --- the options of generate ----------------------------------------------------------------------------------------

_REFUSED_ARGUMENTS = (
    *("stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "assistant_tokenizer", "custom_generate"),
    *("negative_prompt_ids", "negative_prompt_attention_mask", "synced_gpus", "inputs_embeds", "position_ids"),
    *("token_type_ids", "past_key_values"),
)
_REFUSED_SETTINGS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "max_time")
_REMEDY = "omit it, or call the target's own generate"
_DEFAULT_NEW_TOKENS = 20  # transformers' default


def _resolve(
    defaults: GenerationConfig, given: GenerationConfig | None, options: Mapping[str, Any]
) -> GenerationConfig:
    """Merge three levels of options: ``options`` take precedence over ``given``, and ``given`` over ``defaults``.

    Unset values stay unset.
    """
    config: GenerationConfig = copy.deepcopy(given) if given is not None else GenerationConfig()
    config.update(**defaults.to_dict(), defaults_only=True, allow_custom_entries=True)
    unknown = [name for name, value in config.update(**options).items() if value is not None]
    if unknown:
        raise UserError(f"generate does not take {' or '.join(unknown)}: check the spelling")
    for name in _REFUSED_SETTINGS:
        if getattr(config, name, None):
            raise UserError(f"{name} is {getattr(config, name)}, which is not supported", _REMEDY)
    return config


def _resolve_lengths(config: GenerationConfig, width: int, max_positions: int | None) -> int:
    """Return the maximum number of new tokens. Limits that also count the prompt and its padding are converted."""
    if config.min_new_tokens is None and config.min_length:
        config.min_new_tokens = max(0, config.min_length - width)
    config.min_length = None
    if config.eos_token_id is None:
        config.min_new_tokens = None  # without EOS there is no end to delay
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if config.max_length is None:
        warnings.warn(f"max_new_tokens is not set: at most {_DEFAULT_NEW_TOKENS} tokens are written", stacklevel=3)
        longest = width + _DEFAULT_NEW_TOKENS
        config.max_length = longest if max_positions is None else min(longest, max_positions)
    if config.max_length <= width:
        raise UserError(f"the prompt is {width} tokens long and max_length is {config.max_length}: set max_new_tokens")
    return int(config.max_length - width)


def _token_list(value: Any) -> list[int]:
    return [] if value is None else [int(token) for token in torch.as_tensor(value).flatten()]
