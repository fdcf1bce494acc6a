"""`pccheckctl report`: a page that shows what the last checkpoints did, and what they cost."""
