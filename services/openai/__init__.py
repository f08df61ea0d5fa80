"""OpenAI's requests as jobs, and the events of jobs as OpenAI's answers, whoever asks: the gateway, or a batch."""
