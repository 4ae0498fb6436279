"""Plan, deploy and keep LLM endpoints on fleets of GPU hosts."""
