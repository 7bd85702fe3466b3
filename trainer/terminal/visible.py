"""Text from models and files, made safe for a terminal."""

_SHOWN = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    0x7F: "\N{SYMBOL FOR DELETE}",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
}


def visible(text: str) -> str:
    """Return text with a visible sign for each control character but tabs and line ends: no escape sequence is left."""
    return text.translate(_SHOWN)
