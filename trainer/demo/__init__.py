"""The web demo: plain and speculative decoding streamed side by side. Only `app` needs Gradio."""
