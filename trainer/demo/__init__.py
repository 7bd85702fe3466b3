"""The web demo, which streams plain and speculative decoding side by side. Only `app` needs Gradio."""
