"""What the prefix cache saves and costs, counted with the real scheduler and no model."""
