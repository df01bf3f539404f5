"""The paper's tables, and ours."""
