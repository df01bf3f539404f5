"""The cost model's rates measured on this machine, and predictions compared with runs."""
