"""HTTP: OpenAI, Anthropic, health, metrics, the chat page. Translates; decides nothing about decoding."""
