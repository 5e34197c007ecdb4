"""Rewards and advantages of rollouts: functions of users, and those of this package."""
