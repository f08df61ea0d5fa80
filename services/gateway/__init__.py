"""The HTTP front door: OpenAI-shaped requests become jobs on the bus, their events become answers.

Renders and tokenises by itself, so that broken or over-long requests are refused before anything is queued. Knows
nothing of models beyond their text side: torch is never imported here. The only home of aiohttp.
"""
