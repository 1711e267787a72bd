"""What workers exchange in step: through the host processes, or where it fits through NCCL."""
