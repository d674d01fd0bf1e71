"""What a group shares: a log that all append to, gates where all arrive, and signs of life.

port.py     what any store must do
redis.py    `RedisStore`: Redis or Valkey; the job's own, one by URL, or one that is started for the group
file.py     `FileStore`: a folder that all ranks reach
tcp.py      `TCPStore`: torch's, hosted outside of the ranks
"""
