"""kvstore.runtime.models: model families the runtime can run."""
