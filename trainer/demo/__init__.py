"""The web demo: plain decoding beside speculative decoding, streamed. All but `app` does without Gradio."""
