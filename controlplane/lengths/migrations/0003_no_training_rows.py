from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("lengths", "0002_one_active_one_shadow")]

    operations = [migrations.DeleteModel(name="LengthTraining")]
