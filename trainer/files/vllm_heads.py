"""Names of Medusa heads' tensors in vLLM's format, for those who write it and those who read it."""


def vllm_name(name: str) -> str:
    """Translate our name of a tensor into vLLM's; vLLM ignores every other name in silence."""
    match name.split("."):
        case ["heads", head, "blocks", layer, "linear", part]:
            return f"blocks.{head}.layers.{layer}.{part}"
        case ["heads", head, "lm_head", "weight"]:
            return f"lm_heads.{head}.weight"
    raise AssertionError(f"{name} is of heads that vLLM has no place for")
