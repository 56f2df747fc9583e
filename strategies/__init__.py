"""How an update runs: Lightning strategies, topologies, consensus and engines."""
