"""What is allowed: frozen gates that decide whether one backend may replace another.

Works on anyone's tables and traces, and needs numpy and pandas only.
"""

from tinyllm.acceptance.accept import Qualification, qualify
from tinyllm.acceptance.convergence import convergence_gate
from tinyllm.acceptance.gates import GateResult, Verdict
from tinyllm.acceptance.numerical import numerical_gate
from tinyllm.acceptance.performance import performance_gate
from tinyllm.acceptance.power import pass_probability, seeds_needed
from tinyllm.acceptance.protocol import (
    PROTOCOL_1,
    PROTOCOL_2,
    Protocol,
    Recipe,
    Workload,
)
from tinyllm.acceptance.traces import TraceComparison, TraceError, compare_traces

__all__ = [
    "PROTOCOL_1",
    "PROTOCOL_2",
    "GateResult",
    "Protocol",
    "Qualification",
    "Recipe",
    "TraceComparison",
    "TraceError",
    "Verdict",
    "Workload",
    "compare_traces",
    "convergence_gate",
    "numerical_gate",
    "pass_probability",
    "performance_gate",
    "qualify",
    "seeds_needed",
]
