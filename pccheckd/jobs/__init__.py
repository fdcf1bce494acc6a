"""All ranks: who is connected, what the ranks of a job decide together, who has how much DRAM."""
