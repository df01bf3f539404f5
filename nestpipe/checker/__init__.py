"""Is a schedule well formed, is it synchronous training, and does a real trace follow it?"""

from nestpipe.checker.problem import Problem
from nestpipe.checker.rules import check

__all__ = ["Problem", "check"]
