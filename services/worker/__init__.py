"""What prefill and decode workers share: the process, who may run, and a job's place in the chain."""
