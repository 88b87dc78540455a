"""The frozen decoder: configuration, weights, arithmetic."""
