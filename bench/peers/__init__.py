"""Other engines on the same machine and weights: vLLM on the CPU and OpenVINO GenAI, beside llama-server."""
