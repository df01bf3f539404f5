"""The KuaiRand logs: read, checked and converted once."""
