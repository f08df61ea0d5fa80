"""The Redis tier: Redis or Valkey, one server or a cluster. The only home of redis-py."""

from kvstore.redis.tier import RedisTier

__all__ = ["RedisTier"]
