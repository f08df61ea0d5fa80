"""Everything on NATS: the work queues, the chained reply stream, beats and cancels. The only home of nats-py.

`delivery` is the one place that settles messages, `replies` and `ends` (through `chain`) the one that publishes
events. Nothing here knows what a model is.
"""
