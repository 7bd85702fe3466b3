"""Export of trained heads and drafts in served formats, with a model card, and upload to the Hub."""
