"""The native core on asyncio: calls in threads, events on the loop, tenants, GPUs."""
