"""What the OpenAI API looks like on the wire: request models that refuse by name, and answer bodies. No network."""
