"""Loading models and hooking transformers' attention."""
