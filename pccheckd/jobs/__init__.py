"""All jobs: who is connected, what a rank restores, who has how much DRAM."""
