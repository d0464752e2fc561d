"""Classes that vLLM makes by their names. Only vLLM imports these modules, and they import vLLM."""
